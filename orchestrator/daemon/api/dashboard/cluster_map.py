"""The cluster as a map: nodes with their devices, what runs on each, and the links between those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from device_profiles.device_load import name_device_counters
from device_profiles.device_names import name_compute_unit
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.daemon.api.admin.routes import describe_device
from orchestrator.daemon.control.port import DraftView, ReplicaView, StateView

_SHOWN_OF_DEVICE = (
    "name",
    "utilisation",
    "ours",
    "others",
    "memory_total_bytes",
    "memory_free_bytes",
    "memory_ours_bytes",
    "temperature_c",
    "power_w",
    "queue_depth",
    "hot",
)


def build_map(view: StateView, plan: Mapping[str, Any] | None, hosts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return `nodes`, `devices`, `workers` and `links` as plain data. `plan`: the running one; `hosts`: of the fleet.

    A device is named "NODE/DEVICE". A worker's `role` is "target", "standby" or "draft"; a target that is cut in
    several shards has one entry for each, with its `layers`. A link goes `from` one worker's id `to` another's, and its
    `kind` is "draft" or "layers"."""
    planned = list((plan or {}).get("plan", {}).get("replicas", []))
    names = [device.name for device in view.devices]
    known = {_name_unit(name): name for name in reversed(names)}
    workers: list[dict[str, Any]] = []
    links: list[dict[str, Any]] = []
    for replica in view.replicas:
        shards = _take_shards(planned, replica, known)
        ids = [f"{replica.name}/{number}" for number in range(len(shards))]
        for worker_id, shard in zip(ids, shards, strict=True):
            workers.append({**_describe_replica(replica, shard), "id": worker_id})
        links += [_link(before, after, "layers", True) for before, after in pairwise(ids)]
    for standby in view.standbys:
        shard = {"device": _find_device(_name_device(standby), known) or standby.device, "layers": ""}
        workers.append({**_describe_replica(standby, shard), "role": "standby", "id": f"standby/{standby.name}"})
    for draft in view.drafts:
        described = _describe_draft(draft, known)
        if sum(other.name == draft.name for other in view.drafts) > 1:
            described["name"] = f"{draft.name} {draft.number}"
        workers.append(described)
        waits = _read_answer_ms(view, draft)
        links += [
            {
                **_link(described["id"], f"{target}/0", "draft", target in draft.connected),
                "answer_ms": waits.get(target),
            }
            for target in draft.targets
        ]
    devices = [_describe_load(device) for device in map(describe_device, view.devices)]
    devices += [{"name": name} for name in sorted({worker["device"] for worker in workers} - set(names)) if name]
    return {"nodes": _list_nodes(devices, hosts), "devices": devices, "workers": workers, "links": links}


def _describe_load(device: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: device[name] for name in _SHOWN_OF_DEVICE}
    shares = {name: round(shown[name], 3) for name in ("utilisation", "ours", "others") if shown[name] is not None}
    return {**shown, **shares}


def _take_shards(planned: list[Any], replica: ReplicaView, known: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return where a replica's layers are, and take its entry out of the plan's. Without one its worker says so."""
    name = _name_device(replica)
    units = list(map(_name_unit, name.split("+")))
    for index, entry in enumerate(planned):
        places = [shard["device"] for shard in entry["shards"]]
        if list(map(_name_unit, places)) == units if name else replica.device in map(name_device_counters, places):
            shards = planned.pop(index)["shards"]
            several = len(shards) > 1
            return [
                {
                    "device": shard["device"],
                    "layers": f"layers {shard['first_layer']} to {shard['end_layer'] - 1}" if several else "",
                }
                for shard in shards
            ]
    cut = replica.ready.shards.layers if replica.ready is not None else []
    if not cut:
        return [{"device": _find_device(name, known) or replica.device, "layers": ""}]
    return [
        {"device": _find_device(device, known), "layers": layers.partition(" on ")[0]}
        for device, layers in zip(name.split("+"), cut, strict=True)
    ]


def _name_device(replica: ReplicaView) -> str:
    return replica.ready.device.name if replica.ready is not None else ""


def _find_device(name: str, known: Mapping[str, str]) -> str:
    """Return a device's whole name; "" where it is not known yet. `known`: whole names by unit. Another engine's server
    is a node of its own, by its address."""
    if not name:
        return ""
    if "://" in name:
        return f"{urlsplit(name).netloc}/server"
    return known.get(_name_unit(name), f"{THIS_NODE}/{name}")


def _name_unit(place: str) -> str:
    """Return one name for a device, with its host or without, whichever runtime spells it."""
    return name_compute_unit(place.rpartition("/")[2])


def _describe_replica(replica: ReplicaView, shard: Mapping[str, Any]) -> dict[str, Any]:
    gauges, ready = replica.gauges, replica.ready
    return {
        **{name: getattr(replica, name) for name in ("name", "engine", "phase", "detail", "held", "streams")},
        "role": "standby" if replica.standby else "target",
        "draft": replica.draft or ", ".join(ready.drafting.drafters if ready is not None else ()),
        "max_depth": ready.drafting.max_depth if ready is not None else 0,
        "adapter": ready.device.adapter if ready is not None else "",
        "weights": ready.precision.weights if ready is not None else "",
        "running": gauges.running if gauges is not None else 0,
        "waiting": gauges.waiting if gauges is not None else 0,
        **shard,
    }


def _describe_draft(draft: DraftView, known: Mapping[str, str]) -> dict[str, Any]:
    device = draft.ready.drafter.device if draft.ready is not None else ""
    return {
        "id": f"draft/{draft.name}/{draft.number}",
        "role": "draft",
        "name": draft.name,
        "phase": draft.phase,
        "detail": draft.detail,
        "device": _find_device(device, known),
        "layers": "",
        "busy": draft.load.busy if draft.load is not None else None,
        "sequences": draft.load.sequences if draft.load is not None else 0,
    }


def _read_answer_ms(view: StateView, draft: DraftView) -> dict[str, float]:
    """Return how long each target waits for this draft's answers, a mean, by the replica's name."""
    return {
        replica.name: state.remote.answer_ms
        for replica in view.replicas
        for state in (replica.gauges.drafters if replica.gauges is not None else ())
        if state.name == draft.name and state.remote is not None
    }


def _link(start: str, end: str, kind: str, up: bool) -> dict[str, Any]:
    return {"from": start, "to": end, "kind": kind, "up": up}


def _list_nodes(devices: Sequence[Mapping[str, Any]], hosts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    known = {host["host"]: host for host in hosts}
    names = list(dict.fromkeys([*(device["name"].rpartition("/")[0] for device in devices), *known]))
    return [
        {
            "name": name,
            "title": known.get(name, {}).get("name", "") or known.get(name, {}).get("hostname", "") or name,
            "zone": known.get(name, {}).get("zone", ""),
            "left_out": known.get(name, {}).get("left_out", ""),
        }
        for name in names
    ]
