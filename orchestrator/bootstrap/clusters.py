"""Picks what starts worker processes."""

from __future__ import annotations

from orchestrator.config.model import ClusterConfig
from orchestrator.workers.contract import Cluster


def measuring_cluster(config: ClusterConfig) -> Cluster:
    """Return what runs measuring workers: the Ray cluster that is named, else processes of this machine."""
    return build_cluster(config) if config.cluster.on_ray and config.cluster.address else local_cluster()


def local_cluster() -> Cluster:
    """Return what starts processes on this machine."""
    from orchestrator.workers.local import LocalCluster

    return LocalCluster()


def build_cluster(config: ClusterConfig) -> Cluster:
    """Return the cluster that the configuration asks for, not yet opened."""
    if config.cluster.on_ray:
        from orchestrator.workers.ray_runtime import RayCluster

        return RayCluster(config.cluster.address, has_token=config.cluster.auth == "token")
    return local_cluster()
