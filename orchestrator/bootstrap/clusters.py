"""Picks what starts worker processes."""

from __future__ import annotations

from orchestrator.cluster.contract import Cluster
from orchestrator.config.model import ClusterConfig


def measuring_cluster(config: ClusterConfig) -> Cluster:
    """Return what runs measuring workers: the Ray cluster that is named, else processes of this machine."""
    return build_cluster(config) if config.cluster.runtime == "ray" and config.cluster.address else local_cluster()


def local_cluster() -> Cluster:
    """Return what starts processes on this machine."""
    from orchestrator.cluster.local import LocalCluster

    return LocalCluster()


def build_cluster(config: ClusterConfig) -> Cluster:
    """Return the cluster that the configuration asks for, not yet opened."""
    if config.cluster.runtime == "ray":
        from orchestrator.cluster.on_ray import RayCluster

        return RayCluster(config.cluster.address)
    return local_cluster()
