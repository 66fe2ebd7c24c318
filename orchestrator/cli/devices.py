"""`outrider devices`: what the installed runtimes can use of this machine, and whether it has been measured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from device_profiles.units import human_bytes
from orchestrator.plain_table import print_table

if TYPE_CHECKING:
    from device_profiles.measured import MeasuredModel


def devices(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    config: Annotated[
        Path | None, typer.Option(help="cluster.yaml, to find the store; else the default places, if any.")
    ] = None,
) -> None:
    """List devices by runtime: hardware, driver, versions, number formats, and their profiles."""
    from orchestrator.config.load import load_or_default
    from orchestrator.planning.profiling.work import profile_store

    store = profile_store(load_or_default(config))
    known = {(one.adapter, one.device, one.fingerprint): one.measured_at for one in store.devices()}
    found = [_with_profile(one, known, store.models()) for one in _list_devices()]
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _print(found)


def _list_devices() -> list[dict[str, Any]]:
    """Return the devices of each runtime; one that is not installed has a reason instead."""
    from adapters import registry
    from adapters.contract import AdapterUnavailable
    from adapters.device_memory import read_device_memory
    from adapters.distributions import find_foreign
    from adapters.hardware import hardware, runtime_version
    from device_profiles.measured import fingerprint

    rows: list[dict[str, Any]] = [
        {"runtime": one.name, "unavailable": f"{one.distribution} brings one that is not used: {one.problem}"}
        for one in find_foreign().refused
    ]
    for name in registry.names():
        if name == "simulated":
            continue
        try:
            version = runtime_version(name)
            there = registry.list_devices(name)
        except AdapterUnavailable as error:
            rows.append({"runtime": name, "unavailable": str(error)})
            continue
        for device in there:
            facts, memory = hardware(device), read_device_memory(device)
            rows.append(
                {
                    "runtime": name,
                    "runtime_version": version,
                    "device": device.name,
                    "hardware": dataclasses.asdict(facts),
                    "memory_total_bytes": memory.total_bytes,
                    "memory_free_bytes": memory.free_bytes,
                    "precisions": [one.value for one in device.precisions],
                    "weights": [one.value for one in device.weights],
                    "kv_cache": [one.value for one in device.kv_cache],
                    "fingerprint": fingerprint(facts, version),
                }
            )
    return rows


def _with_profile(
    row: dict[str, Any], known: dict[tuple[str, str, str], str], models: list[MeasuredModel]
) -> dict[str, Any]:
    """Return a device with when it was measured, and which models' profiles on it are to be measured again."""
    if "unavailable" in row:
        return row
    me = (row["runtime"], row["device"], row["fingerprint"])
    mine = [one for one in models if (one.adapter, one.device, one.fingerprint) == me]
    doubts = {
        kind: [f"{one.model} ({one.role}): {why}" for one in mine if (why := getattr(one, kind))]
        for kind in ("drifted", "disturbed")
    }
    return {**row, "measured_at": known.get(me, ""), **doubts}


def _print(rows: list[dict[str, Any]]) -> None:
    shown = []
    for row in rows:
        if "unavailable" in row:
            shown.append((row["runtime"], "", row["unavailable"], "", "", ""))
            continue
        runtime, formats = f"{row['runtime']} ({row['runtime_version']})", ", ".join(row["precisions"])
        profile = "; ".join(
            [
                row["measured_at"] or "none: run outrider profile",
                *(f"{kind}: {one}" for kind in ("drifted", "disturbed") for one in row[kind]),
            ]
        )
        memory = _describe_memory(row["memory_free_bytes"], row["memory_total_bytes"])
        shown.append((runtime, row["device"], _hardware(row["hardware"]), memory, formats, profile))
    print_table(("runtime", "device", "hardware", "memory free", "computes in", "profile"), shown)


def _describe_memory(free_bytes: int, total_bytes: int) -> str:
    """Return what can be had of a device's memory: of a processor's, what our control groups allow."""
    return f"{human_bytes(free_bytes)} of {human_bytes(total_bytes)}" if total_bytes else "not known"


def _hardware(facts: dict[str, Any]) -> str:
    nodes = facts["numa_nodes"]
    told = [
        facts["name"],
        human_bytes(facts["memory_bytes"]) if facts["memory_bytes"] else None,
        f"driver {facts['driver']}" if facts["driver"] else None,
        f"{facts['physical_cores']} cores, {nodes} NUMA node{'s' * (nodes > 1)}" if facts["physical_cores"] else None,
        " ".join(facts["isa"]),
    ]
    return "; ".join(part for part in told if part)
