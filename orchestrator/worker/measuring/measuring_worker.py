"""Builds measuring workers: one process for each runtime, device and model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from adapters import registry
from adapters.contract import Capabilities, Exactness
from adapters.device_memory import read_device_memory
from adapters.energy import EnergyMeter, energy_meter
from adapters.hardware import cores, hardware, name_device_kind, runtime_version
from adapters.model_source import check_model, resolve
from adapters.rates import MeasuresRates
from device_profiles.acceptance import PairAcceptance, TargetTexts
from device_profiles.device_load import PROCESSOR, DeviceLoad, name_counters
from device_profiles.device_names import CUDA_KIND, find_index
from device_profiles.measured import DeviceRates, Energy, MeasuredDevice, MeasuredModel, RoundOverhead
from device_profiles.profile import DeviceProfile
from orchestrator.clock import Clock, SystemClock
from orchestrator.fitting.profile_keys import formats_of, profiles_in, threads_of
from orchestrator.machine.device_sampler import DeviceSampler
from orchestrator.machine.devices import find_device, mark_of
from orchestrator.machine.process_memory import peak_rss_bytes
from orchestrator.protocol.load_options import ModelOptions, SuffixOptions
from orchestrator.protocol.measuring import CHAT_WORKLOAD, Finding, ProfileJob
from orchestrator.worker.drafting.suffix import SuffixDrafter
from orchestrator.worker.engine.batch import count_logits_rows
from orchestrator.worker.loading.class_words import describe_choice, describe_rejected
from orchestrator.worker.loading.drafters import build_suffix
from orchestrator.worker.loading.first_cost import find_loaded_digest
from orchestrator.worker.loading.models import LoadedSource, load_model
from orchestrator.worker.loading.prepared import SIMULATED_PREFIX
from orchestrator.worker.loading.statistics import find_statistics
from orchestrator.worker.measuring.engine import MeasuringEngine, OnProgress
from orchestrator.worker.measuring.few_layers import (
    FewLayers,
    StageTimes,
    find_few_layers,
    load_few_layers,
    scale_steps,
)
from orchestrator.worker.measuring.live_loop import LiveLoopResult, measure_policy_yield, prompts_of, talk
from orchestrator.worker.measuring.pairs import compare_choices, replay_drafter
from orchestrator.worker.measuring.steps import Steps, measure_steps

# ADR 0108: the kernel's counters are sums, so few looks tell the mean.
_EVERY_S: Final = 1.0

Sample = Callable[[], Mapping[str, DeviceLoad]]
# ADR 0024: 32 sequences, and one for chunks of prompts.
SLOTS = 33
# Drafts of a sequence in a forward that is measured. Not tuned.
_DEEPEST = 8
_IDLE_S = 0.5  # of looking at the power of a device at rest. Not tuned.
_ENDED_FIRST = "500"
# ADR 0033: what the policy yields is found at each of them.
_SEQUENCES = (1, 4, 16)
# ADR 0033: the policy's yield is that of its bound, so each has figures of its own.
_BOUNDS = (1, 4, 12)


class OthersMeter:
    """Looks at a device between forwards, so that none of them is disturbed by it.

    `counters`: whose counters tell of the device. `threads` of `cores` are used; what others take of the remaining
    cores disturbs nobody. Both are 0 off the processor.
    """

    def __init__(self, sample: Sample, clock: Clock, counters: str, *, threads: int = 0, cores: int = 0) -> None:
        self._sample, self._clock, self._counters = sample, clock, counters
        self._threads, self._cores = threads, cores
        self._looked_s = -math.inf
        self._weighted, self._whole_s = 0.0, 0.0

    def begin(self) -> None:
        self._look()
        self._weighted = self._whole_s = 0.0

    def look_when_due(self) -> None:
        """Look, where that is some time ago. To be called while nothing is timed."""
        if self._clock.monotonic_s() - self._looked_s >= _EVERY_S:
            self._look()

    def read(self) -> float | None:
        """Return the mean share, 0 to 1, that others took since `begin`; None where nobody can tell."""
        self._look()
        return round(self._weighted / self._whole_s, 3) if self._whole_s else None

    def _look(self) -> None:
        load = self._sample().get(self._counters)
        now_s = self._clock.monotonic_s()
        if load is not None and load.others is not None and math.isfinite(self._looked_s):
            self._weighted += (now_s - self._looked_s) * find_taken(load.others, self._threads, self._cores)
            self._whole_s += now_s - self._looked_s
        self._looked_s = now_s


def find_taken(others: float, threads: int, cores: int) -> float:
    """Return the share of so many threads' time that others take, where they take the share `others` of all cores."""
    if not 0 < threads < cores:
        return min(1.0, others)
    return min(1.0, max(0.0, others * cores - (cores - threads)) / threads)


def name_measured(kind: str, device: str) -> str:
    """Return whose counters tell of a device of that kind: simulated ones run on the processor."""
    return PROCESSOR if kind in ("cpu", "simulated") else name_counters(device)


def build_measuring_engine(options: dict[str, Any]) -> MeasuringEngine:
    """Return the engine of a measuring worker. Called inside the worker process."""
    job = msgspec.convert(options, ProfileJob)
    with suppress(OSError):  # where memory runs out, this ends, and not what serves beside it
        Path("/proc/self/oom_score_adj").write_text(_ENDED_FIRST, encoding="ascii")
    return MeasuringEngine(lambda progress: _keep(job, _measure(job, progress)))


def _keep(job: ProfileJob, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Pass on what is found, stored on this host where that is wanted."""
    store = profiles_in(Path(job.model.store))
    for finding in findings:
        if job.keep:
            store.save(finding)
        yield finding


@dataclass(frozen=True, slots=True)
class _Bench:
    job: ProfileJob
    device: DeviceProfile
    meter: EnergyMeter
    others: OthersMeter
    progress: OnProgress
    clock: SystemClock
    started_s: float
    free_bytes: int
    """Of the device, before anything was loaded."""

    @property
    def peak_bytes(self) -> int:
        """What a model took at most: of the host's memory this process's peak. Of an NVIDIA device's what is free less
        than before, as torch gives nothing back."""
        if name_device_kind(self.device) != CUDA_KIND:
            return peak_rss_bytes()
        return max(0, self.free_bytes - read_device_memory(self.device).free_bytes)

    @property
    def threads(self) -> int:
        return threads_of(self.job.model, self.device)

    @property
    def mark(self) -> str:
        return mark_of(self.device)


def _measure(job: ProfileJob, progress: OnProgress) -> Iterator[Finding]:
    device = find_device(job.model.adapter, job.model.device)
    index = find_index(device.name) or 0 if name_device_kind(device) == CUDA_KIND else 0
    meter = energy_meter(name_device_kind(device), index)
    others = _build_others(job.model, device)

    def tell(stage: str, fraction: float) -> None:
        others.look_when_due()
        progress(stage, fraction)

    free_bytes = read_device_memory(device).free_bytes
    bench = _Bench(job, device, meter, others, tell, SystemClock(), time.perf_counter(), free_bytes)
    if not job.known_device:
        yield _measure_device(bench)
    if job.device_only:
        return
    if job.may_cut:
        room_bytes = job.room_bytes or free_bytes
        few = find_few_layers(job.model, SLOTS, _count_logits_rows(job.model), room_bytes, tell)
        if few is not None:
            tell(few.explain(room_bytes), -1.0)
            yield _measure_few_layers(bench, few)
            return
    with ExitStack() as stack:
        loaded, load_s = _load_timed(bench)
        stack.callback(loaded.model.close)
        others.begin()
        steps = measure_steps(loaded.model, bench.clock, tell, budget_s=job.steps_s)
        if job.role == "draft":
            yield _describe_model(bench, loaded, steps, load_s, RoundOverhead(), None)
            if job.texts is not None:
                yield _draft_pair(bench, loaded)
            return
        texts = None if job.texts is None else msgspec.convert(job.texts, TargetTexts)
        if job.early:  # what ends this now leaves something to plan with
            described = _describe_model(bench, loaded, steps, load_s, RoundOverhead(), None)
            yield replace(described, forwards_only=True)
        tell("decode", -1.0)
        engine = msgspec.structs.replace(job.engine, model=job.model)
        real = talk(loaded, engine, steps.cost, bench.clock, meter, texts=texts)
        described = _describe_model(bench, loaded, steps, load_s, real.overhead, real.energy_j_per_token)
        yield replace(described, cost=real.cost)
        if texts is None and real.outputs:
            texts = _texts(loaded, real)
            yield texts
        if texts is not None:
            yield from _suffix_pairs(bench, loaded, texts, real)


def _load_timed(bench: _Bench) -> tuple[LoadedSource, float]:
    begins: list[float] = []

    def progress(stage: str, fraction: float) -> None:
        if stage == "load" and not begins:
            begins.append(time.perf_counter())
        bench.progress(stage, fraction)

    rows = _count_logits_rows(bench.job.model)
    loaded = load_model(bench.job.model, SLOTS, progress, logits_rows=rows, serves=bench.job.role == "target")
    return loaded, time.perf_counter() - (begins[0] if begins else bench.started_s)


def _count_logits_rows(model: ModelOptions) -> int:
    return count_logits_rows(model.max_batch_rows, SLOTS, _DEEPEST)


def _measure_few_layers(bench: _Bench, few: FewLayers) -> MeasuredModel:
    """Return the profile of a model by some of its layers. What a round takes beside its forward is not known."""
    options, began_s = bench.job.model, time.perf_counter()
    times = StageTimes()
    model, classes = load_few_layers(few, options, times, bench.progress)
    load_s = time.perf_counter() - began_s
    try:
        bench.others.begin()
        measured = measure_steps(model, bench.clock, bench.progress, budget_s=bench.job.steps_s)
        caps, memory = model.capabilities, few.memory
        steps, call_ms = scale_steps(few, times, measured, caps)
        return _fill_in(bench, caps, steps)(
            model=few.ready.name,
            model_digest=few.digest,
            weights=caps.weights.partition(" + ")[0],
            formats=formats_of(options, few=True),
            overhead=RoundOverhead(call_ms),
            load_s=load_s * few.layers / few.count,
            row_invariant=caps.exactness is Exactness.BIT,
            class_reason=describe_choice(classes),
            classes_rejected=tuple(describe_rejected(classes)),
            layers=few.layers,
            kv_bytes_per_token=round(model.spec.bytes_per_token * few.layers / few.count),
            weights_bytes=_count_prepared_bytes(few.ready.prepared),
            planned_bytes=memory.whole,
            planned_parts={"workspace": memory.workspace},
            few_layers=few.count,
            layer_parts=memory.parts,
        )
    finally:
        model.close()


def _fill_in(bench: _Bench, caps: Capabilities, steps: Steps) -> partial[MeasuredModel]:
    """Return a profile that lacks what it says of the model itself, and of its loading."""
    return partial(
        MeasuredModel,
        fingerprint=bench.mark,
        adapter=bench.device.adapter,
        device=bench.device.name,
        role=bench.job.role,
        activations=caps.activations.value,
        kv_cache=caps.kv_cache.value,
        exactness=bench.job.model.exactness,
        threads=bench.threads,
        cost=steps.cost,
        decode_error=steps.decode.median_error,
        prefill_error=steps.prefill.median_error,
        worst_error=max(steps.decode.worst_error, steps.prefill.worst_error),
        paid_rows=caps.min_rows,
        numerical_class=str(caps.numerical_class),
        matrix_elements=_elements(bench.job.model),
        peak_bytes=bench.peak_bytes,
        samples=steps.samples,
        measured_at=_now(),
        took_s=time.perf_counter() - bench.started_s,
        others=bench.others.read(),
    )


def _count_prepared_bytes(prepared: Path) -> int:
    return sum(path.stat().st_size for path in prepared.iterdir() if path.is_file())


def _build_others(model: ModelOptions, device: DeviceProfile) -> OthersMeter:
    threads, kind = threads_of(model, device), name_device_kind(device)
    counters = name_measured(kind, device.name)
    return OthersMeter(DeviceSampler().sample, SystemClock(), counters, threads=threads, cores=cores())


def _measure_device(bench: _Bench) -> MeasuredDevice:
    bench.progress("measure products of matrices", -1.0)
    bench.others.begin()
    adapter = registry.get(bench.device.adapter)
    idle = _power(bench.meter, lambda: time.sleep(_IDLE_S))
    rates = DeviceRates()

    def work() -> None:
        nonlocal rates
        if isinstance(adapter, MeasuresRates):
            rates = adapter.rates(bench.device.name, bench.threads)

    load = _power(bench.meter, work)
    meter = bench.meter
    energy = Energy(meter.name, meter.reason, idle, load if rates.matmul else None)
    return MeasuredDevice(
        fingerprint=bench.mark,
        adapter=bench.device.adapter,
        device=bench.device.name,
        runtime_version=runtime_version(bench.device.adapter),
        hardware=hardware(bench.device),
        threads=bench.threads,
        rates=rates,
        energy=energy,
        measured_at=_now(),
        took_s=time.perf_counter() - bench.started_s,
        others=bench.others.read(),
    )


def _power(meter: EnergyMeter, work: Callable[[], None]) -> float | None:
    """Return the mean power, in watts, while something is done; None where the device does not tell."""
    before, began = meter.joules(), time.perf_counter()
    if before is None:
        work()
        return None
    work()
    after = meter.joules()
    return None if after is None else (after - before) / (time.perf_counter() - began)


def _texts(loaded: LoadedSource, real: LiveLoopResult) -> TargetTexts:
    prompts = tuple(tuple(submit.prompt) for submit in prompts_of(loaded)[: len(real.outputs)])
    return TargetTexts(loaded.name, find_loaded_digest(loaded), CHAT_WORKLOAD, prompts, real.outputs, _now())


def _suffix_pairs(
    bench: _Bench, loaded: LoadedSource, texts: TargetTexts, real: LiveLoopResult
) -> Iterator[PairAcceptance]:
    """Return the acceptance at fixed depths, and where the policy chooses them with so many sequences at once."""
    for draft in bench.job.engine.drafters:
        if not isinstance(draft, SuffixOptions):
            continue

        def make(draft: SuffixOptions = draft) -> SuffixDrafter:
            return build_suffix(draft, statistics=find_statistics(draft, bench.job.model, loaded))

        fixed = replay_drafter(make, texts, min_rows=loaded.model.capabilities.min_rows, clock=bench.clock)
        of = (texts.target, texts.target_digest, draft.name, texts.workload)
        yield PairAcceptance(*of, "fixed", 1, fixed.by_depth, fixed.draft_ms, _now())
        engine = msgspec.structs.replace(bench.job.engine, model=bench.job.model, drafters=[draft])
        for sequences in _SEQUENCES:
            yields = tuple(measure_policy_yield(loaded, engine, texts, real, sequences, bound) for bound in _BOUNDS)
            adapter = bench.job.model.adapter
            yield PairAcceptance(*of, "policy", sequences, yields, fixed.draft_ms, _now(), adapter=adapter)


def _draft_pair(bench: _Bench, loaded: LoadedSource) -> PairAcceptance:
    bench.progress("compare drafts with the target's texts", -1.0)
    texts = msgspec.convert(bench.job.texts, TargetTexts)
    return PairAcceptance(
        texts.target,
        texts.target_digest,
        bench.job.drafter,
        texts.workload,
        "fixed",
        1,
        compare_choices(loaded.model, texts),
        measured_at=_now(),
        drafter_digest=find_loaded_digest(loaded),
    )


def _describe_model(
    bench: _Bench,
    loaded: LoadedSource,
    steps: Steps,
    load_s: float,
    overhead: RoundOverhead,
    energy_j_per_token: float | None,
) -> MeasuredModel:
    caps, spec, plan = loaded.model.capabilities, loaded.model.spec, loaded.plan
    return _fill_in(bench, caps, steps)(
        model=loaded.name,
        model_digest=find_loaded_digest(loaded),
        weights=caps.weights,
        formats=formats_of(bench.job.model),
        overhead=overhead,
        load_s=load_s,
        row_invariant=loaded.row_invariant,
        class_fingerprint=loaded.class_fingerprint,
        class_reason=describe_choice(loaded.classes) if loaded.classes else "",
        classes_rejected=tuple(describe_rejected(loaded.classes)) if loaded.classes else (),
        layers=spec.layers,
        kv_bytes_per_token=spec.bytes_per_token,
        weights_bytes=_count_prepared_bytes(loaded.prepared),
        planned_bytes=plan.total if plan else 0,
        planned_parts=plan.parts if plan else {},
        device_parts=loaded.layers.device.parts if loaded.layers and not loaded.layers.shared else {},
        energy_j_per_token=energy_j_per_token,
    )


def _elements(options: ModelOptions) -> int:
    if options.source.startswith(SIMULATED_PREFIX):
        return 0
    return check_model(resolve(options.source, Path(options.base)), options.adapter).matrix_elements


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
