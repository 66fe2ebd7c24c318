"""The tables of `outrider profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from device_profiles.acceptance import PairAcceptance
from device_profiles.link import LinkProfile
from device_profiles.measured import MeasuredDevice, MeasuredModel
from device_profiles.profile import Precision
from device_profiles.roofline import roofline
from device_profiles.units import GIB, MS_PER_S, human_bytes
from orchestrator.plain_table import print_lines, print_table

_CHUNK = 512


_MODEL_COLUMNS = "models|runtime|role|model|class|1, 5, 16 rows|prefill|round|error|load|memory|bound"


def print_profiles(profiles: dict[str, list[Any]], took_s: float, store: Path) -> None:
    """Print devices, models, pairs and links."""
    devices, models = profiles["devices"], profiles["models"]
    tables = {
        "devices|runtime|device|threads|rates, GFLOP/s|memory|energy": map(_build_device_row, devices),
        _MODEL_COLUMNS: (_build_model_row(model, devices) for model in models),
        "drafts|drafter|depths|tokens in a round, by depth|drafting": map(_build_pair_row, profiles["pairs"]),
        "links|from|to|round trip|bandwidth": map(_build_link_row, profiles["links"]),
    }
    for names, lazy_rows in tables.items():
        title, *columns = names.split("|")
        if rows := list(lazy_rows):
            print_table(columns, rows, title=title, title_left=True)
    doubts = [
        f"{model.model} ({model.role}) on {model.adapter} {model.device}: {model.doubt}; predictions by it are "
        f"± {model.error:.0%}"
        for model in models
        if model.doubt
    ]
    spent = f"measured in {took_s:.0f} s" if took_s else "nothing was measured: all of it was stored"
    print_lines(*doubts, f"{spent}; kept in {store}", wraps=False)


def _build_device_row(device: MeasuredDevice) -> tuple[str, ...]:
    rates, energy = device.rates, device.energy
    return (
        f"{device.adapter} ({device.runtime_version})",
        f"{device.device}: {device.hardware.name}",
        f"{device.threads or ''}",
        ", ".join(f"{rate.precision} {rate.flops / 1e9:.0f}" for rate in rates.matmul) or "not measured",
        f"{rates.bandwidth_bytes_per_s / 1e9:.0f} GB/s",
        f"{energy.idle_w:.0f} W idle" if energy.idle_w is not None else energy.reason,
    )


def _build_model_row(model: MeasuredModel, devices: list[MeasuredDevice]) -> tuple[str, ...]:
    planned = f" of {human_bytes(model.planned_bytes)} planned" if model.planned_bytes else ""
    return (
        f"{model.adapter} {model.device}" + (f", {model.threads} threads" if model.threads else ""),
        model.role,
        f"{model.model} {model.weights}, {model.exactness}",
        f"{model.numerical_class}; {model.class_fingerprint or 'not measured'}",
        f"{', '.join(f'{model.cost.ms(count):.1f}' for count in (1, 5, 16))} ms",
        f"{_CHUNK * MS_PER_S / model.cost.prefill_ms(_CHUNK):.0f} tok/s",
        f"+ {model.overhead.ms(1, 1):.2f} ms",
        f"{model.decode_error:.0%}, {model.prefill_error:.0%}",
        f"{model.load_s:.1f} s",
        f"{human_bytes(model.peak_bytes)}{planned}",
        describe_bound(model, devices),
    )


def describe_bound(model: MeasuredModel, devices: list[MeasuredDevice]) -> str:
    """Return what bounds a model's decoding, as people read it; empty where rates are not known."""
    mine = (model.fingerprint, model.adapter, model.threads)
    rates = next(
        (device.rates for device in devices if mine == (device.fingerprint, device.adapter, device.threads)), None
    )
    flops = rates.flops(Precision(model.activations)) if rates is not None and model.matrix_elements else 0.0
    if rates is None or not flops or not rates.bandwidth_bytes_per_s:
        return ""
    verdict = roofline(
        read_bytes=model.weights_bytes,
        matrix_elements=model.matrix_elements,
        flops=flops,
        bandwidth_bytes_per_s=rates.bandwidth_bytes_per_s,
    )
    return f"{verdict.bound}; compute from depth {verdict.turns_at_depth}"


def _build_pair_row(pair: PairAcceptance) -> tuple[str, ...]:
    runtime = f" in {pair.adapter}" if pair.adapter else ""
    sequences = f", {pair.sequences} sequences" if pair.rule == "policy" else ""
    return (
        f"{pair.drafter} on {pair.target}, {pair.workload}, {pair.rule} depth{runtime}{sequences}",
        ", ".join(f"{figures.depth}" for figures in pair.by_depth),
        ", ".join(f"{figures.tokens:.2f}" for figures in pair.by_depth),
        f"{pair.draft_ms:.2f} ms" if pair.draft_ms else "",
    )


def _build_link_row(link: LinkProfile) -> tuple[str, ...]:
    return (link.left, link.right, f"{link.rtt_ms:.3f} ms", f"{link.bytes_per_s / GIB:.2f} GiB/s")
