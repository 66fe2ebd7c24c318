"""What `cluster`, `hosts` and `links` may not say together with the rest of cluster.yaml."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config.hosts import check_running_hosts
from orchestrator.config.model import ClusterConfig
from orchestrator.config.source_text import Lines, Place, describe_place
from orchestrator.errors import ConfigError


def check_cluster(config: ClusterConfig, path: Path, lines: Lines) -> None:
    """Refuse keys that would change nothing. Raises ConfigError."""
    cluster = config.cluster
    for key in ("address", "auth"):
        where = f"{path}:{lines.get(('cluster', key), 1)}: cluster.{key}:"
        if key in cluster.model_fields_set and getattr(cluster, key) and cluster.runtime == "local":
            raise ConfigError(f"{where} goes with Ray, and cluster.runtime is 'local'; leave one of them out")
    if cluster.job_server and (not cluster.on_ray or cluster.address):
        where = describe_place(path, lines, ("cluster", "job_server"))
        raise ConfigError(f"{where} goes with a Ray of the daemon's own: cluster.runtime 'ray' and no cluster.address")
    if "://" in cluster.address:
        where = describe_place(path, lines, ("cluster", "address"))
        raise ConfigError(f"{where} Ray's client protocol is not supported; write HOST:PORT of its head")
    if "auth" in cluster.model_fields_set and not cluster.address:
        where = describe_place(path, lines, ("cluster", "auth"))
        raise ConfigError(f"{where} goes with cluster.address; a Ray of the daemon's own always has a token")


def check_cluster_hosts(config: ClusterConfig, path: Path, lines: Lines) -> None:
    """Refuse hosts that no daemon can use. Raises ConfigError."""
    if not config.cluster.address:
        for key in ("hosts", "links"):
            if key in config.model_fields_set and getattr(config, key):
                where = f"{path}:{lines.get((key,), 1)}: {key}:"
                raise ConfigError(f"{where} go with cluster.address, the Ray of these hosts; add it, or leave them out")
        return
    check_running_hosts(config.hosts, path, lines)
    if (config.hosts or "discover" in config.cluster.model_fields_set) and not any(
        one.planned for one in config.targets
    ):
        key = "hosts" if config.hosts else "discover"
        place: Place = ("hosts",) if config.hosts else ("cluster", "discover")
        where = f"{path}:{lines.get(place, 1)}: {key}:"
        raise ConfigError(f"{where} goes with a plan; set model.adapter or model.device to auto, or leave it out")
