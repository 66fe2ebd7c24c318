"""Stored profiles of simulated devices, as `outrider profile` would have written them."""

from __future__ import annotations

from pathlib import Path

from adapters.hardware import runtime_version
from adapters.model_digests import digest_simulated_model
from device_profiles.cost import StepCost
from device_profiles.measured import Hardware, MeasuredDevice, MeasuredModel, RoundOverhead, fingerprint
from device_profiles.store import ProfileStore
from orchestrator.config.placement import PlacementSection

GIB = 1 << 30


def drift_after(tolerance: float, after_s: float, pause_s: float = 30.0) -> PlacementSection:
    """Return when a running plan is made anew: `tolerance` off for so long, and not before so long a pause."""
    changes = {"drift_tolerance": tolerance, "drift_after_s": after_s, "replan_pause_s": pause_s}
    return PlacementSection().model_copy(update=changes)


def store_simulated_profiles(
    directory: Path,
    row_ms: dict[str, float],
    model: str = "toy",
    role: str = "target",
    script: str = "",
    *,
    memory_bytes: int = GIB,
    measured_at: str = "2026-01-01",
    threads: int = 0,
    cores: int = 0,
    hardware_name: str = "simulated device {}",
    more_row_ms: float = 0.0,
    layers: int = 1,
    weights_bytes: int = 1024,
    peak_bytes: int = 64 << 20,
    others: float | None = None,
    adapter: str = "simulated",
    digest: str = "",
    hardware: Hardware | None = None,
    version: str = "",
    weights: str = "fp32",
) -> ProfileStore:
    """Store what a forward of one row takes on each of these devices; eight rows take the same, and `more_row_ms` for
    each row beyond the first. `hardware_name`: "{}" in it is the device. Where `cores` are given, the devices are
    processors with so many, and this is measured with so many `threads`. `others`: the share that others took.
    `digest`, `hardware` and `version` of the runtime: of a real one. `weights`: what the runtime took for `auto`."""
    digest = digest or digest_simulated_model(f"simulated:toy?{script}")
    store = ProfileStore(directory)
    for device, ms in row_ms.items():
        kind = "cpu" if cores else "simulated"
        seen = hardware or Hardware(kind, hardware_name.format(device), memory_bytes, physical_cores=cores)
        runtime = version or (runtime_version(adapter) if adapter == "simulated" else f"{adapter} 1.0")
        mark = fingerprint(seen, runtime)
        store.save(MeasuredDevice(mark, adapter, device, runtime, seen, 0, measured_at=measured_at))
        store.save(
            MeasuredModel(
                fingerprint=mark,
                adapter=adapter,
                device=device,
                role=role,
                model=model,
                model_digest=digest,
                weights=weights,
                activations="fp32",
                kv_cache="fp32",
                exactness="bit",
                formats="auto auto auto",
                threads=threads,
                cost=StepCost((1.0, 8.0, 64.0), (ms, ms + 7 * more_row_ms, 2 * ms + 63 * more_row_ms)),
                decode_error=0.02,
                prefill_error=0.02,
                worst_error=0.05,
                overhead=RoundOverhead(0.2),
                load_s=0.1,
                row_invariant=True,
                paid_rows=1,
                layers=layers,
                kv_bytes_per_token=1024,
                weights_bytes=weights_bytes,
                peak_bytes=peak_bytes,
                measured_at=measured_at,
                others=others,
            )
        )
    return store
