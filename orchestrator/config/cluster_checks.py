"""What `models`, `cluster`, `hosts` and `links` may not say together with the rest of cluster.yaml."""

from __future__ import annotations

import re

from orchestrator.config.hosts import check_running_hosts
from orchestrator.config.model import ClusterConfig
from orchestrator.config.source_text import Place, SourceFile, format_place, format_value


def check_names(config: ClusterConfig, file: SourceFile) -> None:
    """Refuse targets that a request could not tell apart. Raises ConfigError."""
    if not config.models:
        return
    if not config.model.name:
        why = "is missing: requests choose among several models by their names"
        raise file.refuse(("model", "name"), why)
    seen: dict[str, Place] = {config.model.name: ("model", "name")}
    for index, target in enumerate(config.models):
        place: Place = ("models", index, "name")
        if (first := seen.setdefault(target.name, place)) != place:
            known = f"{format_place(first)} in line {file.lines.get(first, 1)}"
            raise file.refuse(place, f"{format_value(target.name)} is the name of another model, {known}; choose one")
    for view in config.targets:
        for index, lora in enumerate(view.model.adapters):
            if (name := f"{view.model.name}:{lora.name}") in seen:
                place = view.find_place("model", "adapters", index, "name")
                raise file.refuse(place, f"requests call it {format_value(name)}, and so they do a model; choose one")


def check_cluster(config: ClusterConfig, file: SourceFile) -> None:
    """Refuse keys that would change nothing. Raises ConfigError."""
    cluster = config.cluster
    for key in ("address", "auth"):
        if key in cluster.model_fields_set and getattr(cluster, key) and cluster.runtime == "local":
            why = "goes with Ray, and cluster.runtime is 'local'; leave one of them out"
            raise file.refuse(("cluster", key), why)
    if cluster.job_server and (not cluster.on_ray or cluster.address):
        why = "goes with a Ray of the daemon's own: cluster.runtime 'ray' and no cluster.address"
        raise file.refuse(("cluster", "job_server"), why)
    if "://" in cluster.address:
        why = "Ray's client protocol is not supported; write HOST:PORT of its head"
        raise file.refuse(("cluster", "address"), why)
    if cluster.head and not re.fullmatch(r"\S+:\d+", cluster.address):
        why = "goes with cluster.address: HOST:PORT of this machine, by which other hosts reach it"
        raise file.refuse(("cluster", "head"), why)
    if "auth" in cluster.model_fields_set and not cluster.address:
        why = "goes with cluster.address; a Ray of the daemon's own always has a token"
        raise file.refuse(("cluster", "auth"), why)


def check_cluster_hosts(config: ClusterConfig, file: SourceFile) -> None:
    """Refuse hosts that no daemon can use. Raises ConfigError."""
    if not config.cluster.address:
        for key in ("hosts", "links"):
            if key in config.model_fields_set and getattr(config, key):
                why = "go with cluster.address, the Ray of these hosts; add it, or leave them out"
                raise file.refuse((key,), why)
        return
    check_running_hosts(config.hosts, file)
    wanted = config.hosts or "discover" in config.cluster.model_fields_set
    if wanted and not any(target.planned for target in config.targets):
        place: Place = ("hosts",) if config.hosts else ("cluster", "discover")
        raise file.refuse(place, "goes with a plan; set model.adapter or model.device to auto, or leave it out")
