"""Picks what starts worker processes."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config.model import ClusterConfig
from orchestrator.protocol.contract import Cluster


def measuring_cluster(config: ClusterConfig) -> Cluster:
    """Return what runs measuring workers: the Ray cluster that is named, else processes of this machine."""
    return build_cluster(config) if config.cluster.across_hosts else local_cluster()


def local_cluster() -> Cluster:
    from orchestrator.launch.local import LocalCluster

    return LocalCluster()


def build_cluster(config: ClusterConfig, state: Path | None = None) -> Cluster:
    """Return the cluster that the configuration asks for, not yet opened. `state`: the daemon's own directory, in which
    its workers are found by the next one; without it they end with whoever starts them."""
    if config.cluster.on_ray:
        from orchestrator.launch.ray_runtime import RayCluster

        cluster = config.cluster
        has_token = cluster.auth == "token"
        return RayCluster(cluster.address, has_token=has_token, jobs=cluster.job_server, head=cluster.head)
    wait_s = config.cluster.orphan_wait_s
    if state is None or not wait_s:
        return local_cluster()
    from orchestrator.launch.local import LocalCluster, OrphanPolicy

    return LocalCluster(OrphanPolicy(workers_directory(state), wait_s))


def workers_directory(state: Path) -> Path:
    """Return where a daemon's local workers are found by the next one, in its own directory `state`."""
    return state / "workers"
