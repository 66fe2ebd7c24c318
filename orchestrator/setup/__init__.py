"""What `outrider init` does: models and servers of this machine, a proposal for them, and its cluster.yaml."""
