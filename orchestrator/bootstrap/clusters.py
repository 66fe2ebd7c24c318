"""Picks what starts worker processes."""

from __future__ import annotations

from orchestrator.cluster.port import Cluster
from orchestrator.config.model import ClusterConfig


def build_cluster(config: ClusterConfig) -> Cluster:
    """Return the cluster that the configuration asks for, not yet opened."""
    if config.cluster.runtime == "ray":
        from orchestrator.cluster.on_ray import RayCluster

        return RayCluster(config.cluster.address)
    from orchestrator.cluster.local import LocalCluster

    return LocalCluster()
