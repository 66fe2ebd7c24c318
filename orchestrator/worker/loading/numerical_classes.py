"""Chooses the numerical class that a model runs in: by measuring each once on a device, and keeping what came of it."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from adapters.contract import (
    Exactness,
    FilesInPlace,
    LoadedModel,
    LoadOptions,
    ModelLoader,
    ModelRefused,
    NumericalClass,
    OutOfMemory,
    Progress,
    list_classes,
)
from adapters.decoder.short_text import ShortText, read_short_text
from adapters.decoder.source import open_source
from adapters.decoder.spec import NotConvertible
from adapters.device_memory import read_host_memory
from adapters.held_lock import hold_lock
from adapters.invariance import fingerprint_bits
from adapters.model_checks import check_files
from adapters.model_identity import ServedClass
from adapters.names import TRANSFORMERS
from device_profiles.device_names import is_processor
from device_profiles.numerical_class import ClassFinding, MeasuredClasses, choose_class
from device_profiles.store import ProfileStore
from orchestrator.clock import SystemClock
from orchestrator.worker.loading.child_work import OnLook, run_child
from orchestrator.worker.loading.timed_trials import ClassJob, ClassTrial, TimedTrials, TrialHere, try_apart
from orchestrator.worker.measuring.class_trial import try_class

CHEAPER = 0.95
"""A class that fewer devices share is taken where it costs less than so much of one that more of them do. ADR 0040. Not
tuned."""
_BUDGET_S = 12.0
"""Behind a class that passed, the next ones are tried only so long. ADR 0040: a first start takes 13 s for two classes
of the default model."""
_SHORT_TEXT = "short-text.json"
_MOST_ELEMENTS = 1_000_000_000
"""Of the matrices of a model that a float32 reference is computed for. A reference in float32 takes 8 bytes of memory
for each."""


@dataclass(frozen=True, slots=True)
class ClassQuestion:
    """Which class a prepared model is to run in. `options` has the operator's options; the other fields are the key
    of the answer (see MeasuredClasses). `file`: the model's own, None for a simulated one. `isolated`: each class is
    tried in a process of its own. `soon`: the first class is tried on the model that then serves, on a short text.
    `served`: in which classes other workers of the daemon run the model."""

    adapter: ModelLoader
    prepared: Path
    options: LoadOptions
    fingerprint: str
    model: str
    model_digest: str
    weights: str
    threads: int
    file: Path | None
    store: Path
    isolated: bool
    soon: bool = False
    served: tuple[ServedClass, ...] = ()

    @property
    def place(self) -> str:
        """On what hardware and runtime the model runs, and what of it the operator's options leave open."""
        return "; ".join((self.fingerprint, self.adapter.name, self.options.device, self.weights, self.wanted_formats))

    @property
    def served_class(self) -> str:
        """The class of other workers in such a place, "" where there are none: equal devices measure unlike costs, and
        chance would decide between them."""
        return next((served.name for served in self.served if served.place == self.place), "")

    @property
    def wanted_formats(self) -> str:
        """The choice that the operator's options leave open, in words."""
        formats = f"{self.options.activations or 'auto'} {self.options.kv_cache or 'auto'} {self.options.exactness}"
        loras = [f" {lora.name} {lora.digest}" for lora in self.options.loras]
        return f"{formats} {self.adapter.__class__.__name__}{''.join(loras)}"


def load_in_class(
    question: ClassQuestion, progress: Progress, *, refresh: bool = False
) -> tuple[LoadedModel, MeasuredClasses]:
    """Load a model in the class that was found for it on this device; where none is known, find it.

    Raises ModelRefused where no class passes, which says why, and what adapters raise.
    """
    profiles = ProfileStore(question.store / "profiles")
    known = None if refresh else _find_agreed(profiles, question)
    with ExitStack() as alone:
        if known is None:
            # One after another: trials beside each other would measure each other.
            alone.enter_context(_hold_lock(profiles.directory, progress))
            known = None if refresh else _find_agreed(profiles, question)
        if known is not None and known.finding is not None:
            model = _load(question, known.finding, progress)
            if fingerprint_bits(model) == known.finding.fingerprint:
                return model, known
            model.close()
            progress("bits are not those that were measured: find the numerical class again", -1.0)
        served = beside = None
        if not refresh:
            served = _find_served(question)
            beside = served or _find_beside(profiles, question)
        if question.soon and not refresh and beside is served:
            loaded = _try_first(profiles, question, progress, served)
            if loaded is not None:
                return loaded
        if isinstance(question.adapter, FilesInPlace):
            question.adapter.drop_ahead()  # trials load the model in processes of their own
        measured = find_class(question, progress, beside, budget_s=math.inf if refresh else _BUDGET_S)
        if measured.finding is None:
            raise ModelRefused(_describe_refusal(question, measured))
        with suppress(OSError):  # a read-only store serves; the next start measures again
            profiles.save(measured)
    return _load(question, measured.finding, progress), measured


def _try_first(
    profiles: ProfileStore, question: ClassQuestion, progress: Progress, served: NumericalClass | None
) -> tuple[LoadedModel, MeasuredClasses] | None:
    """Load a model in the class in which others serve, else in its first, and return it where that passes a short
    check; None where it does not, or where an earlier process did not come back from trying."""
    mark = profiles.directory / f"{question.fingerprint}-{question.model_digest}-{question.adapter.name}.tried"
    first = served or list_classes(question.adapter, question.prepared, question.options)[0][0]
    with suppress(OSError):
        if mark.exists():
            return None
        mark.touch()
    clock = SystemClock()
    started_s = clock.monotonic_s()
    model = question.adapter.load(question.prepared, replace(question.options, numerical_class=first), progress)
    progress(f"check that output does not depend on the batch: {first}", -1.0)
    loaded_s = clock.monotonic_s()
    finding = try_class(model, _find_short_text(question), loaded_s - started_s, brief=True)
    with suppress(OSError):
        mark.unlink(missing_ok=True)
    if not finding.passed:
        model.close()
        return None
    measured = _describe_measured(question, [finding], 0, clock.monotonic_s() - loaded_s)
    with suppress(OSError):  # a read-only store serves; the next start measures again
        profiles.save(measured)
    return model, measured


@contextmanager
def _hold_lock(directory: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock of a store's trials; go on without it where nothing can be written."""
    with ExitStack() as held:
        with suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            held.enter_context(hold_lock(directory / "classes.lock", progress, "another worker that tries classes"))
        yield


def find_class(
    question: ClassQuestion, progress: Progress, beside: NumericalClass | None = None, *, budget_s: float = _BUDGET_S
) -> MeasuredClasses:
    """Try an adapter's classes, tier by tier, until one of a tier passes. `beside`: the class of workers of this model
    on this device with another number of threads, which is taken if it passes. Raises what `list_classes` raises."""
    text = _short_text(question, progress)
    clock = SystemClock()
    started_s = clock.monotonic_s()
    findings: list[ClassFinding] = []
    tiers = list_classes(question.adapter, question.prepared, question.options)
    for tier in tiers if beside is None else [[beside], *tiers]:
        until_s = started_s + budget_s
        together = question.isolated and is_processor(question.options.device)
        try:
            findings += _try_tier(question, tier, text, progress, until_s, together=together)
        except OutOfMemory:
            if not together:
                raise
            findings += _try_tier(question, tier, text, progress, until_s, together=False)
        if any(finding.passed for finding in findings):
            break
    chosen = choose_class(tuple(findings), CHEAPER)
    if chosen >= 0:
        on_look = _say_again(progress, "check that output does not depend on the number of threads")
        findings[chosen] = _check_one_thread(question, findings[chosen], on_look)
    return _describe_measured(question, findings, chosen, clock.monotonic_s() - started_s)


def _try_tier(
    question: ClassQuestion,
    tier: Sequence[NumericalClass],
    text: ShortText | None,
    progress: Progress,
    until_s: float,
    *,
    together: bool,
) -> list[ClassFinding]:
    """Try the classes of a tier; where one passed, only until then. Those that passed are timed in turns where they
    may be in memory `together`, as far as there is room. Raises OutOfMemory."""
    clock, trials = SystemClock(), TimedTrials()
    try:
        for candidate in tier:
            if trials.any_passed and clock.monotonic_s() > until_s:
                trials.findings.append(
                    ClassFinding(candidate, False, "not tried: a class passed, and trying took its time", tried=False)
                )
                continue
            if not (together and trials.leave_room()):
                trials.time_open()
            on_look = _say_again(progress, f"check that output does not depend on the batch: {candidate}")
            trials.add(_try(question, candidate, text, on_look))
        trials.time_open()
    finally:
        trials.close()
    return trials.findings


def _describe_measured(
    question: ClassQuestion, findings: Sequence[ClassFinding], chosen: int, took_s: float
) -> MeasuredClasses:
    return MeasuredClasses(
        fingerprint=question.fingerprint,
        adapter=question.adapter.name,
        device=question.options.device,
        model=question.model,
        model_digest=question.model_digest,
        weights=question.weights,
        asked=question.wanted_formats,
        threads=question.threads,
        findings=tuple(findings),
        chosen=chosen,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        took_s=round(took_s, 2),
    )


def _say_again(progress: Progress, stage: str) -> OnLook:
    progress(stage, -1.0)
    return lambda cpu_s: progress(f"{stage}, {cpu_s:.0f} s of processor time so far", -1.0)


def _try(question: ClassQuestion, candidate: NumericalClass, text: ShortText | None, on_look: OnLook) -> ClassTrial:
    options = replace(question.options, numerical_class=candidate)
    # In this process nothing is said meanwhile, and a worker that waits for long is taken for hung.
    job = ClassJob(question.adapter.name, str(question.prepared), options, text, far=question.isolated)
    return try_apart(job, candidate, on_look) if question.isolated else TrialHere(question.adapter, job)


def _check_one_thread(question: ClassQuestion, finding: ClassFinding, on_look: OnLook) -> ClassFinding:
    """Return a finding that says whether one thread gives the same bits as all of them."""
    if not question.isolated or question.threads < 2:
        return finding
    options = replace(question.options, numerical_class=finding.numerical_class, threads=1)
    job = ClassJob(question.adapter.name, str(question.prepared), options, only_bits=True)
    trial = try_apart(job, finding.numerical_class, on_look)
    trial.close()
    same = trial.finding.fingerprint == finding.fingerprint
    return replace(finding, why=f"{finding.why}, {'nor' if same else 'but'} on the number of threads")


def _find_known(profiles: ProfileStore, question: ClassQuestion) -> MeasuredClasses | None:
    wanted = (question.adapter.name, question.options.device, question.model_digest, question.weights)
    for known in profiles.classes(question.fingerprint):
        model = (known.adapter, known.device, known.model_digest, known.weights)
        if (*model, known.asked, known.threads) == (*wanted, question.wanted_formats, question.threads):
            return known
    return None


def _find_agreed(profiles: ProfileStore, question: ClassQuestion) -> MeasuredClasses | None:
    """Return what is known, with the class taken in which others serve; None where that was not tried."""
    known, served = _find_known(profiles, question), question.served_class
    if known is None or not served or known.finding is None or str(known.finding.numerical_class) == served:
        return known
    tried = {str(finding.numerical_class) for finding in known.findings if finding.tried}
    if served not in tried and _find_served(question) is not None:
        return None
    agreed = known.prefer(served)
    if agreed is not known:
        with suppress(OSError):  # a read-only store serves
            profiles.save(agreed)
    return agreed


def _find_served(question: ClassQuestion) -> NumericalClass | None:
    """Return the class in which others serve, where the adapter has it."""
    if not (served := question.served_class):
        return None
    tiers = list_classes(question.adapter, question.prepared, question.options)
    return next((candidate for tier in tiers for candidate in tier if str(candidate) == served), None)


def _find_beside(profiles: ProfileStore, question: ClassQuestion) -> NumericalClass | None:
    """Return the class that was taken with another number of threads: replicas of one daemon are to agree."""
    for threads in {measured.threads for measured in profiles.classes(question.fingerprint)} - {question.threads}:
        known = _find_known(profiles, replace(question, threads=threads))
        if known is not None and known.finding is not None:
            return known.finding.numerical_class
    return None


def _load(question: ClassQuestion, finding: ClassFinding, progress: Progress) -> LoadedModel:
    options = replace(question.options, numerical_class=finding.numerical_class)
    return question.adapter.load(question.prepared, options, progress)


def _find_short_text(question: ClassQuestion) -> ShortText | None:
    """Return what the reference says where it has been computed."""
    return read_short_text(question.prepared.parent / _SHORT_TEXT)


def _short_text(question: ClassQuestion, progress: Progress) -> ShortText | None:
    """Return what the reference says, computed once for a model: transformers' own attention and cache where nothing
    else computes it. None for one that is too large for that, or that only llama.cpp's library computes."""
    if question.file is None:
        return None
    path = question.prepared.parent / _SHORT_TEXT
    text = _find_short_text(question)
    if text is not None:
        return text
    program, source = "adapters.decoder.short_text", question.file
    try:
        elements = open_source(question.file).spec.matrix_elements
    except NotConvertible:
        if not question.file.is_dir():
            return None
        elements = check_files(question.file, adapter=TRANSFORMERS).matrix_elements
        program, source = "adapters.torch_device.short_text", question.prepared
    if elements > _MOST_ELEMENTS or 8 * elements > read_host_memory().free_bytes:
        return None
    command = [sys.executable, "-m", program, str(source), str(path)]
    end = run_child(command, b"", _say_again(progress, "compute a short text in float32"))
    return read_short_text(path) if not end.failure else None


def _describe_refusal(question: ClassQuestion, measured: MeasuredClasses) -> str:
    classes: defaultdict[str, list[str]] = defaultdict(list)
    for finding in measured.findings:
        classes[finding.why].append(str(finding.numerical_class))
    tried = "; ".join(
        f"{names[0]}{f', and {len(names) - 1} more' if names[1:] else ''}: {why}" for why, names in classes.items()
    )
    way = "Set exactness: kernel, or choose another adapter or device"
    if question.options.exactness is not Exactness.BIT:
        way = "Choose another adapter or device"
    return (
        f"{question.model} on {question.adapter.name} {question.options.device}: no numerical class is fit for "
        f"exactness {question.options.exactness} ({tried}). {way}."
    )
