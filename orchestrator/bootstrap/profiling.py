"""Builds measuring workers: one process for each runtime, device and model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from adapters import registry
from adapters.decoder.source import open_source
from adapters.energy import EnergyMeter, energy_meter
from adapters.hardware import hardware, kind_of, runtime_version
from adapters.invariance import measure_row_invariance
from adapters.model_source import resolve
from adapters.rates import MeasuresRates
from device_profiles.acceptance import PairAcceptance, TargetTexts
from device_profiles.cost import StepCost
from device_profiles.measured import DeviceRates, Energy, MeasuredDevice, MeasuredModel, RoundOverhead
from device_profiles.memory import MemoryPlan
from device_profiles.profile import DeviceProfile
from orchestrator.bootstrap.drafters import build_drafter
from orchestrator.bootstrap.engine import build_loop
from orchestrator.bootstrap.models import SIMULATED_PREFIX, Loaded, Target, load_model, load_tokenizer
from orchestrator.bootstrap.options import EngineOptions, ModelOptions, SuffixOptions
from orchestrator.bootstrap.profile_keys import device_of, digest_of, formats_of, mark_of, threads_of
from orchestrator.clock import SystemClock
from orchestrator.cluster.port import Submit, WorkerSpec
from orchestrator.cluster.process_memory import peak_rss_bytes
from orchestrator.drafting.suffix import SuffixDrafter
from orchestrator.measuring.engine import Found, MeasuringEngine, OnProgress
from orchestrator.measuring.pairs import compare_choices, replay
from orchestrator.measuring.rounds import RoundSample, WatchedModel, decode, disturbance, fit_overhead, varying_in
from orchestrator.measuring.steps import Steps, measure_steps
from orchestrator.measuring.texts import TEXTS, WORKLOAD

PROFILE_ENTRY = "orchestrator.bootstrap.profiling:build_measuring_engine"
SLOTS = 33
OUTPUT_TOKENS = 96
STEPS_S = 8.0
"""How long forwards of a model are measured, about."""
_IDLE_S = 0.5
_SEQUENCES = (1, 4, 8, 16)


class ProfileJob(msgspec.Struct, frozen=True):
    """One model on one device: measure it in this role. `known_device`: the device's own rates are measured already.
    `texts`: what the target says to `measuring.texts`, as plain data, where that is known; else it is measured.
    `drafter`: the name of a draft. `steps_s`: how long forwards are measured, about."""

    engine: EngineOptions
    model: ModelOptions
    role: Literal["target", "draft"]
    known_device: bool = False
    texts: dict[str, Any] | None = None
    drafter: str = ""
    steps_s: float = STEPS_S


def job_spec(job: ProfileJob, node: str = "") -> WorkerSpec:
    """Return how a measuring worker is started."""
    name = f"measure {job.model.adapter} {job.model.device} {job.drafter or job.role} {job.model.threads}"
    return WorkerSpec(name=name, entry=PROFILE_ENTRY, options=msgspec.to_builtins(job), node=node)


def build_measuring_engine(options: dict[str, Any]) -> MeasuringEngine:
    """Return the engine of a measuring worker. Called inside the worker process."""
    job = msgspec.convert(options, ProfileJob)
    return MeasuringEngine(lambda progress: _measure(job, progress))


@dataclass(frozen=True, slots=True)
class _Bench:
    """What all measurements of a worker share."""

    job: ProfileJob
    device: DeviceProfile
    meter: EnergyMeter
    progress: OnProgress
    clock: SystemClock
    started_s: float

    @property
    def threads(self) -> int:
        return threads_of(self.job.model, self.device)

    @property
    def mark(self) -> str:
        return mark_of(self.device)


def _measure(job: ProfileJob, progress: OnProgress) -> Iterator[Found]:
    device = device_of(job.model.adapter, job.model.device)
    index = int(device.name.partition(":")[2] or 0) if kind_of(device) == "cuda" else 0
    meter = energy_meter(kind_of(device), index)
    bench = _Bench(job, device, meter, progress, SystemClock(), time.perf_counter())
    if not job.known_device:
        yield _measured_device(bench)
    with ExitStack() as stack:
        loaded, load_s = _loaded(bench)
        stack.callback(loaded.model.close)
        invariant = measure_row_invariance(loaded.model)
        steps = measure_steps(loaded.model, bench.clock, progress, budget_s=job.steps_s)
        if job.role == "draft":
            yield _described(bench, loaded, steps, load_s, invariant, RoundOverhead(), None)
            if job.texts is not None:
                yield _draft_pair(bench, loaded)
            return
        talk = _talk(bench, loaded, steps)
        described = _described(bench, loaded, steps, load_s, invariant, talk.overhead, talk.energy_j_per_token)
        yield replace(described, cost=talk.cost)
        if job.texts is None and talk.texts.outputs:
            yield talk.texts
            yield from _suffix_pairs(bench, loaded, talk.texts)


def _loaded(bench: _Bench) -> tuple[Loaded, float]:
    """Return the model, and how long it took from its prepared files into memory."""
    begins: list[float] = []

    def progress(stage: str, fraction: float) -> None:
        if stage == "load" and not begins:
            begins.append(time.perf_counter())
        bench.progress(stage, fraction)

    loaded = load_model(bench.job.model, SLOTS, progress, serves=bench.job.role == "target")
    return loaded, time.perf_counter() - (begins[0] if begins else bench.started_s)


def _measured_device(bench: _Bench) -> MeasuredDevice:
    bench.progress("measure products of matrices", -1.0)
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


@dataclass(frozen=True, slots=True)
class _Talk:
    """What real decoding showed. `cost`: as forwards take on average there."""

    cost: StepCost
    overhead: RoundOverhead
    texts: TargetTexts
    energy_j_per_token: float | None


def _talk(bench: _Bench, loaded: Loaded, steps: Steps) -> _Talk:
    """Decode the shipped prompts: all at once and plainly, then some alone, plainly and with the suffix drafter."""
    bench.progress("decode", -1.0)
    timed = WatchedModel(loaded.model)
    engine = msgspec.structs.replace(
        bench.job.engine,
        model=bench.job.model,
        prefix_reuse=False,
        drafters=[one for one in bench.job.engine.drafters if isinstance(one, SuffixOptions)],
    )
    fields = {name: getattr(loaded, name) for name in Loaded.__dataclass_fields__}
    target = Target(**{**fields, "model": timed}, row_invariant=True, load_s=0.0)
    submits = _submits(loaded)
    before = bench.meter.joules()
    together = decode(build_loop(target, engine, None), timed, submits, bench.clock)
    after = bench.meter.joules()
    rounds: list[RoundSample] = list(together.rounds)
    drafter = build_drafter(engine, target)
    rounds += decode(build_loop(target, engine, None), timed, submits[:1], bench.clock).rounds
    for submit in submits[1:4]:
        rounds += decode(build_loop(target, engine, drafter), timed, [submit], bench.clock).rounds
    outputs = tuple(tuple(together.outputs[one.request_id]) for one in submits)
    spent = None if before is None or after is None else after - before
    cost = replace(steps.cost, varying=varying_in(rounds, steps.cost))
    overhead = fit_overhead(rounds, cost)
    return _Talk(
        cost.scaled(disturbance(rounds, cost, overhead)),
        overhead,
        TargetTexts(
            loaded.name, digest_of(loaded), WORKLOAD, tuple(tuple(one.prompt) for one in submits), outputs, _now()
        ),
        spent / sum(map(len, outputs)) if spent is not None and outputs else None,
    )


def _submits(loaded: Loaded) -> list[Submit]:
    """Return the shipped prompts that the model has room for."""
    tokenizer = load_tokenizer(loaded.tokenizer_dir)
    caps = loaded.model.capabilities
    room = min(caps.max_context_tokens, caps.block_tokens * caps.total_blocks)
    submits = []
    for number, (_, text) in enumerate(TEXTS):
        prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
        tokens = min(OUTPUT_TOKENS, room - len(prompt) - caps.paid_rows)
        if tokens > 0:
            submits.append(Submit(f"{number}", prompt, tokens, stop_tokens=sorted(tokenizer.eos_ids)))
    return submits


def _suffix_pairs(bench: _Bench, loaded: Loaded, texts: TargetTexts) -> Iterator[PairAcceptance]:
    for draft in bench.job.engine.drafters:
        if isinstance(draft, SuffixOptions):
            for sequences in _SEQUENCES:
                yield _suffix_pair(bench, loaded, texts, draft, sequences)
            yield _suffix_pair(bench, loaded, texts, draft, 0)


def _suffix_pair(
    bench: _Bench, loaded: Loaded, texts: TargetTexts, draft: SuffixOptions, sequences: int
) -> PairAcceptance:
    """Return the acceptance where the policy chooses depths, with so many sequences; with none at fixed depths."""

    def make() -> SuffixDrafter:
        return SuffixDrafter(max_match=draft.max_match, memory_bytes=draft.memory_bytes, clock=bench.clock)

    caps, together = loaded.model.capabilities, max(1, sequences)
    paid_rows = 1 if caps.apart_tokens and together > 1 else caps.paid_rows
    by_policy = sequences > 0
    found = replay(make, texts, by_policy=by_policy, sequences=together, paid_rows=paid_rows, clock=bench.clock)
    return PairAcceptance(
        texts.target,
        texts.target_digest,
        draft.name,
        texts.workload,
        "policy" if by_policy else "fixed",
        together,
        found.by_depth,
        found.draft_ms,
        _now(),
    )


def _draft_pair(bench: _Bench, loaded: Loaded) -> PairAcceptance:
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
        drafter_digest=digest_of(loaded),
    )


def _described(
    bench: _Bench,
    loaded: Loaded,
    steps: Steps,
    load_s: float,
    invariant: bool,
    overhead: RoundOverhead,
    energy_j_per_token: float | None,
) -> MeasuredModel:
    caps, spec, plan = loaded.model.capabilities, loaded.model.spec, loaded.plan
    return MeasuredModel(
        fingerprint=bench.mark,
        adapter=bench.device.adapter,
        device=bench.device.name,
        role=bench.job.role,
        model=loaded.name,
        model_digest=digest_of(loaded),
        weights=caps.weights,
        activations=caps.activations.value,
        kv_cache=caps.kv_cache.value,
        exactness=bench.job.model.exactness,
        formats=formats_of(bench.job.model),
        threads=bench.threads,
        cost=steps.cost,
        decode_error=steps.decode.median_error,
        prefill_error=steps.prefill.median_error,
        worst_error=max(steps.decode.worst_error, steps.prefill.worst_error),
        overhead=overhead,
        load_s=load_s,
        row_invariant=invariant,
        paid_rows=caps.paid_rows,
        layers=spec.layers,
        kv_bytes_per_token=spec.bytes_per_token,
        matrix_elements=_elements(bench.job.model),
        weights_bytes=sum(path.stat().st_size for path in loaded.prepared.iterdir() if path.is_file()),
        planned_bytes=plan.total if plan else 0,
        planned_parts={part: getattr(plan, part) for part in MemoryPlan.PARTS} if plan else {},
        peak_bytes=peak_rss_bytes(),
        energy_j_per_token=energy_j_per_token,
        samples=steps.samples,
        measured_at=_now(),
        took_s=time.perf_counter() - bench.started_s,
    )


def _elements(options: ModelOptions) -> int:
    if options.source.startswith(SIMULATED_PREFIX):
        return 0
    return open_source(resolve(options.source, Path(options.base)).path).spec.matrix_elements


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
