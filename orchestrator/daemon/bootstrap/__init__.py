"""Composition only: from a configuration to a cluster, a plan and a canary's trial, with concrete classes."""
