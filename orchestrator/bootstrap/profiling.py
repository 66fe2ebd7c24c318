"""Builds measuring workers, and says what they are to measure: one process for each runtime, device and model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from adapters import registry
from adapters.contract import AdapterUnavailable
from adapters.decoder.source import open_source
from adapters.hardware import cores, hardware, kind_of, runtime_version
from adapters.invariance import measure_row_invariance
from adapters.model_source import resolve
from device_profiles.measured import MeasuredDevice, MeasuredModel, RoundOverhead, fingerprint
from device_profiles.memory import MemoryPlan
from device_profiles.profile import DeviceProfile
from device_profiles.store import ProfileStore
from orchestrator.bootstrap.models import SIMULATED_PREFIX, Loaded, load_model
from orchestrator.bootstrap.options import EngineOptions, ModelOptions, engine_options
from orchestrator.clock import SystemClock
from orchestrator.cluster.port import WorkerSpec
from orchestrator.config.load import store_directory
from orchestrator.config.model import ClusterConfig
from orchestrator.decoding.engine import peak_rss_bytes
from orchestrator.measuring.engine import Found, MeasuringEngine, OnProgress
from orchestrator.measuring.steps import Steps, measure_steps

PROFILE_ENTRY = "orchestrator.bootstrap.profiling:build_measuring_engine"
SLOTS = 33
_STEPS_S = 8.0


class ProfileJob(msgspec.Struct, frozen=True):
    """One model on one device: measure it in this role. `known_device`: the device's own rates are measured already."""

    engine: EngineOptions
    model: ModelOptions
    role: Literal["target", "draft"]
    known_device: bool = False


def job_spec(job: ProfileJob) -> WorkerSpec:
    """Return how a measuring worker is started."""
    name = f"measure-{job.model.adapter}-{job.model.device}-{job.role}"
    return WorkerSpec(name=name, entry=PROFILE_ENTRY, options=msgspec.to_builtins(job))


def build_measuring_engine(options: dict[str, Any]) -> MeasuringEngine:
    """Return the engine of a measuring worker. Called inside the worker process."""
    job = msgspec.convert(options, ProfileJob)
    return MeasuringEngine(lambda progress: _measure(job, progress))


def device_of(adapter: str, device: str) -> DeviceProfile | None:
    """Return a runtime's device by its name. Raises AdapterUnavailable."""
    wanted = "SIM" if adapter == "simulated" else device
    return next((found for found in registry.get(adapter).devices() if found.name == wanted), None)


def threads_of(options: ModelOptions, device: DeviceProfile) -> int:
    """Return how many threads a runtime takes: all physical cores where none are named, 0 off the processor."""
    return (options.threads or cores()) if kind_of(device) == "cpu" else 0


def _measure(job: ProfileJob, progress: OnProgress) -> Iterator[Found]:
    device = device_of(job.model.adapter, job.model.device)
    if device is None:
        return
    if not job.known_device:
        yield _measured_device(job, device)
    yield _measured_model(job, device, progress)


def _measured_device(job: ProfileJob, device: DeviceProfile) -> MeasuredDevice:
    started = time.perf_counter()
    release = runtime_version(job.model.adapter)
    facts = hardware(device)
    return MeasuredDevice(
        fingerprint=fingerprint(facts, release),
        adapter=device.adapter,
        device=device.name,
        runtime_version=release,
        hardware=facts,
        threads=threads_of(job.model, device),
        measured_at=_now(),
        took_s=time.perf_counter() - started,
    )


def _measured_model(job: ProfileJob, device: DeviceProfile, progress: OnProgress) -> MeasuredModel:
    started = time.perf_counter()
    loaded = load_model(job.model, SLOTS, progress)
    load_s = time.perf_counter() - started
    try:
        invariant = measure_row_invariance(loaded.model)
        steps = measure_steps(loaded.model, SystemClock(), progress, budget_s=_STEPS_S)
        return _described(job, device, loaded, steps, load_s, invariant, time.perf_counter() - started)
    finally:
        loaded.model.close()


def _described(
    job: ProfileJob,
    device: DeviceProfile,
    loaded: Loaded,
    steps: Steps,
    load_s: float,
    invariant: bool,
    took_s: float,
) -> MeasuredModel:
    caps, spec = loaded.model.capabilities, loaded.model.spec
    return MeasuredModel(
        fingerprint=fingerprint(hardware(device), runtime_version(device.adapter)),
        adapter=device.adapter,
        device=device.name,
        role=job.role,
        model=loaded.name,
        model_digest=digest_of(loaded),
        weights=caps.weights,
        activations=caps.activations.value,
        kv_cache=caps.kv_cache.value,
        exactness=caps.exactness.value,
        threads=threads_of(job.model, device),
        cost=steps.cost,
        decode_error=steps.decode.median_error,
        prefill_error=steps.prefill.median_error,
        worst_error=max(steps.decode.worst_error, steps.prefill.worst_error),
        overhead=RoundOverhead(),
        load_s=load_s,
        row_invariant=invariant,
        paid_rows=caps.paid_rows,
        layers=spec.layers,
        kv_bytes_per_token=spec.bytes_per_token,
        matrix_elements=_elements(job.model),
        weights_bytes=sum(path.stat().st_size for path in loaded.prepared.iterdir() if path.is_file()),
        planned_bytes=loaded.plan.total if loaded.plan else 0,
        planned_parts={part: getattr(loaded.plan, part) for part in MemoryPlan.PARTS} if loaded.plan else None,
        peak_bytes=peak_rss_bytes(),
        samples=steps.samples,
        measured_at=_now(),
        took_s=took_s,
    )


def digest_of(loaded: Loaded) -> str:
    """Return the digest of a model's files: the store keeps what is prepared from them in a directory of that name."""
    simulated = loaded.source.startswith(SIMULATED_PREFIX)
    return loaded.prepared.name if simulated else loaded.prepared.parent.name


def _elements(options: ModelOptions) -> int:
    if options.source.startswith(SIMULATED_PREFIX):
        return 0
    return open_source(resolve(options.source, Path(options.base)).path).spec.matrix_elements


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of work, and what its result will be known by."""

    title: str
    job: ProfileJob
    fingerprint: str
    threads: int

    @property
    def spec(self) -> WorkerSpec:
        """How its worker is started."""
        return job_spec(self.job)

    def stored(self, store: ProfileStore) -> MeasuredModel | None:
        """Return what is stored of it."""
        return next((one for one in store.models(self.fingerprint) if self._is(one)), None)

    def _is(self, one: MeasuredModel) -> bool:
        wanted = self.job.model
        return (one.adapter, one.role, one.exactness, one.threads) == (
            wanted.adapter,
            self.job.role,
            wanted.exactness,
            self.threads,
        )


def profile_store(config: ClusterConfig) -> ProfileStore:
    """Return where profiles are kept."""
    return ProfileStore(store_directory(config) / "profiles")


def planned_work(config: ClusterConfig, base: Path, wanted: Sequence[str]) -> list[Work]:
    """Return what there is to measure: the target on every runtime and device that is here, or on the `wanted` ones."""
    engine = engine_options(config, base)
    simulated = engine.model.adapter == "simulated"
    found = []
    for name in ["simulated"] if simulated else [name for name in registry.names() if name != "simulated"]:
        try:
            devices = registry.get(name).devices()
        except AdapterUnavailable:
            continue
        for device in devices:
            if wanted and name not in wanted and f"{name}:{device.name}" not in wanted:
                continue
            options = engine.with_model(adapter=name, device=device.name)
            job = ProfileJob(options, options.model, "target")
            mark = fingerprint(hardware(device), runtime_version(name))
            found.append(Work(f"{name} {device.name}", job, mark, threads_of(options.model, device)))
    return found


def pending(work: Sequence[Work], store: ProfileStore) -> list[Work]:
    """Return what is not stored."""
    return [one for one in work if one.stored(store) is None]
