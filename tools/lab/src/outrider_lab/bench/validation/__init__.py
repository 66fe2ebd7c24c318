"""The simulator beside real runs on this machine: the same requests, the same faults, figure by figure."""
