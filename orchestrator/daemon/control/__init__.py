"""Control: what the cluster is doing (state), and making it do what it should (controller)."""
