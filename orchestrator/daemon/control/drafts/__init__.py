"""Draft workers beside the target's replicas."""
