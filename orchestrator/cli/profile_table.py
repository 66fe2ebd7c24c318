"""The tables of `outrider profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from device_profiles.acceptance import PairAcceptance
from device_profiles.link import LinkProfile
from device_profiles.measured import MeasuredDevice, MeasuredModel
from device_profiles.profile import Precision
from device_profiles.roofline import Roofline, roofline
from device_profiles.units import GIB, MS_PER_S, human_bytes
from orchestrator.plain_table import add_row, wide_console

_CHUNK = 512


def print_profiles(found: dict[str, list[Any]], took_s: float, store: Path) -> None:
    """Print devices, models, pairs and links."""
    from rich.table import Table

    console = wide_console()
    tables: tuple[tuple[str, tuple[str, ...], list[tuple[str, ...]]], ...] = (
        ("devices", ("runtime", "device", "threads", "rates, GFLOP/s", "memory", "energy"), _devices(found["devices"])),
        (
            "models",
            (
                "runtime",
                "role",
                "model",
                "class",
                "1, 5, 16 rows",
                "prefill",
                "round",
                "error",
                "load",
                "memory",
                "bound",
            ),
            _models(found["models"], found["devices"]),
        ),
        ("drafts", ("drafter", "depths", "tokens in a round, by depth", "drafting"), _pairs(found["pairs"])),
        ("links", ("from", "to", "round trip", "bandwidth"), _links(found["links"])),
    )
    for title, columns, rows in tables:
        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            add_row(table, *row)
        if rows:
            console.print(table)
    for line in _list_doubts(found["models"]):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    spent = f"measured in {took_s:.0f} s" if took_s else "nothing was measured: all of it was stored"
    console.print(f"{spent}; kept in {store}", soft_wrap=True, markup=False, highlight=False)


def _list_doubts(models: list[MeasuredModel]) -> list[str]:
    """Return in a line each which models are to be measured again, why, and how far predictions by them may be off."""
    return [
        f"{one.model} ({one.role}) on {one.adapter} {one.device}: {one.doubt}; predictions by it are ± {one.error:.0%}"
        for one in models
        if one.doubt
    ]


def _devices(devices: list[MeasuredDevice]) -> list[tuple[str, ...]]:
    return [
        (
            f"{one.adapter} ({one.runtime_version})",
            f"{one.device}: {one.hardware.name}",
            f"{one.threads or ''}",
            ", ".join(f"{rate.precision} {rate.flops / 1e9:.0f}" for rate in one.rates.matmul) or "not measured",
            f"{one.rates.bandwidth_bytes_per_s / 1e9:.0f} GB/s",
            f"{one.energy.idle_w:.0f} W idle" if one.energy.idle_w is not None else one.energy.reason,
        )
        for one in devices
    ]


def _models(models: list[MeasuredModel], devices: list[MeasuredDevice]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for one in models:
        times = ", ".join(f"{one.cost.ms(count):.1f}" for count in (1, 5, 16))
        beside = one.overhead.ms(1, 1)
        rows.append(
            (
                f"{one.adapter} {one.device}" + (f", {one.threads} threads" if one.threads else ""),
                one.role,
                f"{one.model} {one.weights}, {one.exactness}",
                f"{one.numerical_class}; {one.class_fingerprint or 'not measured'}",
                f"{times} ms",
                f"{_CHUNK * MS_PER_S / one.cost.prefill_ms(_CHUNK):.0f} tok/s",
                f"+ {beside:.2f} ms",
                f"{one.decode_error:.0%}, {one.prefill_error:.0%}",
                f"{one.load_s:.1f} s",
                f"{human_bytes(one.peak_bytes)}"
                + (f" of {human_bytes(one.planned_bytes)} planned" if one.planned_bytes else ""),
                describe_bound(one, devices),
            )
        )
    return rows


def describe_bound(model: MeasuredModel, devices: list[MeasuredDevice]) -> str:
    """Return what bounds a model's decoding, as people read it; empty where rates are not known."""
    verdict = verdict_of(model, devices)
    if verdict is None:
        return ""
    return f"{verdict.bound}; compute from depth {verdict.turns_at_depth}"


def verdict_of(model: MeasuredModel, devices: list[MeasuredDevice]) -> Roofline | None:
    """Return the roofline of decoding one sequence, None where something of it is not known."""
    mine = (model.fingerprint, model.adapter, model.threads)
    device = next((one for one in devices if mine == (one.fingerprint, one.adapter, one.threads)), None)
    if device is None or not model.matrix_elements:
        return None
    flops = device.rates.flops(Precision(model.activations))
    if not flops or not device.rates.bandwidth_bytes_per_s:
        return None
    return roofline(
        read_bytes=model.weights_bytes,
        matrix_elements=model.matrix_elements,
        flops=flops,
        bandwidth_bytes_per_s=device.rates.bandwidth_bytes_per_s,
    )


def _pairs(pairs: list[PairAcceptance]) -> list[tuple[str, ...]]:
    return [
        (
            f"{one.drafter} on {one.target}, {one.workload}, {one.rule} depth"
            + (f" in {one.adapter}" if one.adapter else "")
            + (f", {one.sequences} sequences" if one.rule == "policy" else ""),
            ", ".join(f"{found.depth}" for found in one.by_depth),
            ", ".join(f"{found.tokens:.2f}" for found in one.by_depth),
            f"{one.draft_ms:.2f} ms" if one.draft_ms else "",
        )
        for one in pairs
    ]


def _links(links: list[LinkProfile]) -> list[tuple[str, ...]]:
    return [(one.left, one.right, f"{one.rtt_ms:.3f} ms", f"{one.bytes_per_s / GIB:.2f} GiB/s") for one in links]
