"""`outrider devices`: what the installed runtimes can use of this machine, and whether it has been measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from device_profiles.units import human_bytes
from orchestrator.cli.options import AsJson, end_with_json
from orchestrator.plain_table import print_table

if TYPE_CHECKING:
    from device_profiles.measured import MeasuredModel


def devices(
    as_json: AsJson = False,
    config: Annotated[
        Path | None, typer.Option(help="cluster.yaml, to find the store; else the default places, if any.")
    ] = None,
) -> None:
    """List devices by runtime: hardware, driver, versions, number formats, and their profiles."""
    from orchestrator.config.load import load_or_default
    from orchestrator.planning.profiling.work import profile_store

    store = profile_store(load_or_default(config))
    known = {(device.adapter, device.fingerprint): device.measured_at for device in store.devices()}
    rows = [_add_profile(row, known, store.models()) for row in list_device_rows()]
    end_with_json(rows, wanted=as_json)
    print_table(("runtime", "device", "hardware", "memory free", "computes in", "profile"), map(_build_row, rows))


def list_device_rows() -> list[dict[str, Any]]:
    """Return the devices of each runtime; one that is not installed has a reason instead."""
    from adapters import registry
    from adapters.contract import AdapterUnavailable
    from adapters.device_memory import read_device_memory
    from adapters.distributions import find_foreign
    from adapters.hardware import hardware, runtime_version
    from device_profiles.measured import fingerprint

    rows: list[dict[str, Any]] = [
        {"runtime": other.name, "unavailable": f"{other.distribution} brings one that is not used: {other.problem}"}
        for other in find_foreign().refused
    ]
    for name in registry.names():
        if name == "simulated":
            continue
        try:
            version, devices = runtime_version(name), registry.list_devices(name)
        except AdapterUnavailable as error:
            rows.append({"runtime": name, "unavailable": str(error)})
            continue
        for device in devices:
            facts, memory = hardware(device), read_device_memory(device)
            rows.append(
                {
                    "runtime": name,
                    "runtime_version": version,
                    "device": device.name,
                    "hardware": dataclasses.asdict(facts),
                    "memory_total_bytes": memory.total_bytes,
                    "memory_free_bytes": memory.free_bytes,
                    "precisions": [precision.value for precision in device.precisions],
                    "weights": [weights.value for weights in device.weights],
                    "kv_cache": [precision.value for precision in device.kv_cache],
                    "fingerprint": fingerprint(facts, version),
                }
            )
    return rows


def _add_profile(row: dict[str, Any], known: dict[tuple[str, str], str], models: list[MeasuredModel]) -> dict[str, Any]:
    if "unavailable" in row:
        return row
    me = (row["runtime"], row["fingerprint"])  # those that are alike share what was measured
    mine = [model for model in models if (model.adapter, model.fingerprint) == me]
    doubts = {
        kind: [f"{model.model} ({model.role}): {why}" for model in mine if (why := getattr(model, kind))]
        for kind in ("drifted", "disturbed")
    }
    return {**row, "measured_at": known.get(me, ""), **doubts}


def _build_row(row: dict[str, Any]) -> tuple[str, ...]:
    if "unavailable" in row:
        return (row["runtime"], "", row["unavailable"], "", "", "")
    doubts = [f"{kind}: {doubt}" for kind in ("drifted", "disturbed") for doubt in row[kind]]
    profile = "; ".join([row["measured_at"] or "none: run outrider profile", *doubts])
    free, total = row["memory_free_bytes"], row["memory_total_bytes"]  # of a processor: what our control groups allow
    memory = f"{human_bytes(free)} of {human_bytes(total)}" if total else "not known"
    runtime = f"{row['runtime']} ({row['runtime_version']})"
    return (runtime, row["device"], format_hardware(row["hardware"]), memory, ", ".join(row["precisions"]), profile)


def format_hardware(facts: dict[str, Any]) -> str:
    nodes = facts["numa_nodes"]
    parts = [
        facts["name"],
        human_bytes(facts["memory_bytes"]) if facts["memory_bytes"] else None,
        f"driver {facts['driver']}" if facts["driver"] else None,
        f"{facts['physical_cores']} cores, {nodes} NUMA node{'s' * (nodes > 1)}" if facts["physical_cores"] else None,
        " ".join(facts["isa"]),
    ]
    return "; ".join(part for part in parts if part)
