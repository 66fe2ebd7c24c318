"""How a numerical class is chosen: measured once on a device, kept, and never one that was not shown to hold."""

from __future__ import annotations

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.contract import ModelRefused, OutOfMemory
from adapters.libllama import VARIABLE, find_mainline
from adapters.model_identity import ModelIdentity, ServedClass
from device_profiles.numerical_class import MIXED_ROWS, ClassFinding, MeasuredClasses, NumericalClass, choose_class
from device_profiles.profile import Precision
from device_profiles.store import ProfileStore
from orchestrator.config.load import load_config
from orchestrator.daemon.control.state import unlike
from orchestrator.fitting.worker_options import engine_options
from orchestrator.machine.devices import class_mark_of, find_device, join_marks, threads_on
from orchestrator.worker.loading import numerical_classes, timed_trials
from orchestrator.worker.loading.class_words import cost_ratio, describe_choice, describe_rejected
from orchestrator.worker.loading.engine import NOTHING_KNOWN, ready_of
from orchestrator.worker.loading.models import load_target
from orchestrator.worker.loading.numerical_classes import CHEAPER
from orchestrator.worker.loading.timed_trials import TimedTrials, TrialEnded
from orchestrator.worker.measuring.class_trial import PROMPT, time_in_turns
from tests.support.conformance import NO_FORK, NO_MAINLINE
from tests.support.llama_vocabulary import MAINLINE
from tests.support.ready import change_ready
from tests.support.tiny_gguf import Tiny, write

_CHECKED = "check that output does not depend on the batch: "
WORDS = (*map(chr, range(33, 126)), "xy")
WIDE = NumericalClass(Precision.FP32, Precision.FP32, fixed_width=16)
CLASS = NumericalClass(Precision.FP32, Precision.FP16, 32, 2, 2, apart=True)


def options_of(tmp_path, script="", exactness="bit"):
    """Options of the simulated model, which keeps its store in `tmp_path`."""
    path = tmp_path / "cluster.yaml"
    path.write_text(
        f"model: {{source: 'simulated:toy?{script}', adapter: simulated, exactness: {exactness}}}\n"
        f"store: {{directory: '{tmp_path}/store'}}\n"
    )
    return engine_options(load_config(path), tmp_path)


def load(options, **keywords):
    """Load a target and give back its device; return it and what was told meanwhile."""
    told: list[str] = []
    target = load_target(options, lambda stage, fraction: told.append(stage), **keywords)
    target.model.close()
    return target, [stage.removeprefix(_CHECKED) for stage in told if stage.startswith(_CHECKED)]


def test_a_class_is_measured_once_and_then_known(tmp_path):
    options = options_of(tmp_path)
    target, tried = load(options)
    assert len(tried) == 1
    assert target.row_invariant
    found = target.classes.finding
    assert found.passed
    assert [rows for rows, _ in found.decode_ms] == [rows for rows, _ in MIXED_ROWS]
    assert target.class_fingerprint == found.fingerprint != ""
    again, tried = load(options)
    assert tried == []
    assert again.classes == target.classes
    assert ProfileStore(tmp_path / "store" / "profiles").classes() == [target.classes]
    refreshed, tried = load(options, refresh=True)
    assert tried != []
    assert refreshed.class_fingerprint == target.class_fingerprint


def test_a_device_whose_kernels_change_with_the_rows_gets_forwards_of_one_width(tmp_path):
    target, tried = load(options_of(tmp_path, "kernel_rows=9"))
    assert len(tried) == 2
    assert target.row_invariant
    assert target.model.capabilities.numerical_class.fixed_width == 16
    rejected = target.classes.rejected
    assert [one.passed for one in rejected] == [False]
    assert "rows at a time" in rejected[0].why
    assert describe_rejected(target.classes)[0].endswith(rejected[0].why)


@pytest.mark.parametrize("rows", [2, 5, 16, 17, 32, 64, 129, 256])
def test_kernels_that_change_at_any_number_of_rows_are_seen(tmp_path, rows):
    target, _ = load(options_of(tmp_path, f"kernel_rows={rows}"))
    assert not target.classes.findings[0].passed, rows


def test_where_no_class_keeps_its_bits_a_model_is_refused_and_what_they_share_is_told_once(tmp_path):
    options = options_of(tmp_path, "unsteady=1")
    with pytest.raises(ModelRefused) as refused:
        load(options)
    text = str(refused.value)
    assert "exactness bit" in text
    assert text.count("bits depend on the batch") == 1
    assert " more: bits depend" in text
    assert "Set exactness: kernel" in text
    assert ProfileStore(tmp_path / "store" / "profiles").classes() == []
    target, _ = load(options_of(tmp_path, "unsteady=1", "kernel"))
    assert not target.row_invariant


def test_logits_that_are_no_numbers_are_no_class(tmp_path):
    with pytest.raises(ModelRefused, match="not finite"):
        load(options_of(tmp_path, "fault=nan&at=1"))


def test_other_bits_than_those_that_were_measured_are_measured_again(tmp_path):
    options = options_of(tmp_path)
    target, _ = load(options)
    store = ProfileStore(tmp_path / "store" / "profiles")
    found = dataclasses.replace(target.classes.findings[0], fingerprint="of another library")
    store.save(dataclasses.replace(target.classes, findings=(found,)))
    again, tried = load(options)
    assert tried != []
    assert again.class_fingerprint == target.class_fingerprint
    assert store.classes() == [again.classes]


def write_tiny_config(tmp_path, **changes):
    """Options of a tiny file on the runtime that converts nothing."""
    source = tmp_path / "tiny.gguf"
    write(
        source,
        Tiny(
            "llama",
            hidden=128,
            heads=2,
            kv_heads=1,
            head_dim=64,
            context=512,
            vocabulary=len(WORDS),
            words=WORDS,
            **changes,
        ),
    )
    path = tmp_path / "cluster.yaml"
    path.write_text(
        f"model: {{source: '{source}', adapter: llama_cpp}}\nlimits: {{kv_cache: 16 MiB}}\n"
        f"store: {{directory: '{tmp_path}/store'}}\ndevices: {{threads: 1}}\n"
    )
    return engine_options(load_config(path), tmp_path)


def test_where_nothing_is_converted_a_model_serves_after_a_short_check_and_a_later_one_is_whole(tmp_path):
    options = write_tiny_config(tmp_path)
    target, tried = load(options)
    assert len(tried) == 1
    assert target.row_invariant
    assert target.classes.finding.why == "sane, bits do not depend on the batch in a short check"
    assert load(options)[1] == []
    refreshed, _ = load(options, refresh=True)
    assert refreshed.classes.finding.why == "sane, bits do not depend on the batch"
    assert refreshed.class_fingerprint == target.class_fingerprint


def test_where_others_serve_the_short_check_is_of_their_class(tmp_path):
    options = write_tiny_config(tmp_path)
    target, _ = load(options)
    profiles = tmp_path / "store" / "profiles"
    (profiles / "classes").rename(profiles / "before")
    served = target.identity.classes[0]
    pinned = msgspec.structs.replace(options.model, identity=target.identity)
    agreed, tried = load(msgspec.structs.replace(options, model=pinned))
    assert tried == [served.name]
    assert agreed.classes.finding.why == "sane, bits do not depend on the batch in a short check"
    assert (served.others, agreed.identity.classes) == ([], [served])


def test_whoever_did_not_come_back_from_a_short_check_is_followed_by_one_in_a_process_of_its_own(tmp_path):
    options = write_tiny_config(tmp_path)
    target, _ = load(options)
    profiles = tmp_path / "store" / "profiles"
    (profiles / "classes").rename(profiles / "before")
    (profiles / f"{target.classes.fingerprint}-{target.identity.digest}-llama_cpp.tried").touch()
    again, _ = load(options)
    assert again.classes.finding.why == "sane, bits do not depend on the batch"
    assert again.class_fingerprint == target.class_fingerprint


@NO_FORK
@NO_MAINLINE
def test_another_library_behind_the_adapter_has_a_class_of_its_own_and_the_first_finds_its_own_again(
    tmp_path, monkeypatch
):
    place = find_mainline(MAINLINE)
    assert place is not None
    options = write_tiny_config(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    first, _ = load(options)
    # What did not come back from one library is no reason to doubt another.
    begun = f"{first.classes.fingerprint}-{first.identity.digest}-llama_cpp.tried"
    (tmp_path / "store" / "profiles" / begun).touch()
    monkeypatch.setenv(VARIABLE, str(place.file))
    second, tried = load(options)
    assert len(tried) == 1
    assert second.classes.finding.why.endswith("in a short check")
    assert second.classes.fingerprint != first.classes.fingerprint
    monkeypatch.delenv(VARIABLE)
    again, tried = load(options)
    assert tried == []
    assert again.class_fingerprint == first.class_fingerprint


@NO_FORK
@NO_MAINLINE
def test_a_file_that_another_library_runs_has_a_class_of_that_library(tmp_path, monkeypatch):
    """Mainline stands in where ik_llama.cpp has a fault with a file."""
    monkeypatch.delenv(VARIABLE, raising=False)
    plain = load(write_tiny_config(tmp_path))[0]
    (tmp_path / "factors").mkdir()
    other = load(write_tiny_config(tmp_path / "factors", rope_factors=True))[0]
    place = find_mainline(MAINLINE)
    assert place is not None
    assert other.classes.fingerprint == join_marks([plain.classes.fingerprint, place.version])


def test_another_number_of_threads_takes_the_class_that_is_there(tmp_path):
    options = options_of(tmp_path)
    target, _ = load(options)
    store = ProfileStore(tmp_path / "store" / "profiles")
    found = dataclasses.replace(target.classes.findings[0], numerical_class=WIDE)
    (tmp_path / "store" / "profiles" / "classes").rename(tmp_path / "store" / "profiles" / "before")
    store.save(dataclasses.replace(target.classes, threads=target.classes.threads + 3, findings=(found,)))
    again, tried = load(options)
    assert tried == [str(WIDE)]
    assert again.model.capabilities.numerical_class == WIDE


def serve_beside(options, measured: MeasuredClasses, name: str):
    """Return options of a worker that is told in which class others of the daemon serve."""
    place = "; ".join((measured.fingerprint, measured.adapter, measured.device, measured.weights, measured.asked))
    identity = ModelIdentity("m", "1" * 16, classes=[ServedClass(place, name)])
    return msgspec.structs.replace(options, model=msgspec.structs.replace(options.model, identity=identity))


def test_the_class_in_which_others_serve_is_taken_where_it_passes(tmp_path):
    options = options_of(tmp_path)
    target, _ = load(options)
    assert target.model.capabilities.numerical_class != WIDE
    agreed, tried = load(serve_beside(options, target.classes, str(WIDE)))
    assert (tried, agreed.model.capabilities.numerical_class) == ([str(WIDE)], WIDE)
    kept, tried = load(options)
    assert (tried, kept.model.capabilities.numerical_class) == ([], WIDE), "it agrees also behind a restart"


def test_a_class_in_which_others_serve_and_that_does_not_hold_here_is_not_taken(tmp_path):
    options = options_of(tmp_path, "kernel_rows=9")
    target, _ = load(options)
    failed = str(target.classes.rejected[0].numerical_class)
    agreed, tried = load(serve_beside(options, target.classes, failed))
    assert (tried, agreed.class_fingerprint) == ([], target.class_fingerprint)


def test_a_class_that_was_left_out_for_time_is_tried_where_others_serve_in_it(tmp_path):
    options = options_of(tmp_path)
    target, _ = load(options)
    late = ClassFinding(WIDE, False, "not tried", tried=False)
    store = ProfileStore(tmp_path / "store" / "profiles")
    store.save(dataclasses.replace(target.classes, findings=(target.classes.finding, late)))
    kept, _ = load(options)
    assert kept.class_fingerprint == target.class_fingerprint
    agreed, tried = load(serve_beside(options, target.classes, str(WIDE)))
    assert (tried, agreed.model.capabilities.numerical_class) == ([str(WIDE)], WIDE)


def test_of_two_classes_that_passed_the_one_in_which_others_serve_is_taken(tmp_path):
    options = options_of(tmp_path)
    target, _ = load(options)
    finding = target.classes.finding
    both = (dataclasses.replace(finding, numerical_class=WIDE), finding)
    store = ProfileStore(tmp_path / "store" / "profiles")
    store.save(dataclasses.replace(target.classes, findings=both, chosen=1))
    agreed, _ = load(serve_beside(options, target.classes, str(WIDE)))
    assert agreed.model.capabilities.numerical_class == WIDE


def test_workers_on_other_cores_of_one_processor_find_each_others_class():
    device = find_device("openvino_rt", "CPU")
    allowed = os.sched_getaffinity(0)
    on_all = class_mark_of(device), threads_on(device, 0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        on_one = class_mark_of(device), threads_on(device, 0)
    finally:
        os.sched_setaffinity(0, allowed)
    assert on_one == (on_all[0], 1)


def test_workers_that_start_together_try_one_after_another(tmp_path):
    options = options_of(tmp_path, "base_ms=3")
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: load(options), range(3)))
    assert sorted(len(tried) for _, tried in found) == [0, 0, 1]
    assert len({target.class_fingerprint for target, _ in found}) == 1


def test_replicas_are_alike_by_their_bits_whatever_computes_them(tmp_path):
    options = options_of(tmp_path)
    target, _ = load(options)
    ready = ready_of(target, options, 1, 0, NOTHING_KNOWN)
    elsewhere = change_ready(ready, adapter="another", activations="bf16")
    assert unlike(elsewhere, ready) == ""
    other = change_ready(ready, class_fingerprint="other")
    assert "class_fingerprint other instead of" in unlike(other, ready)
    left, right = (change_ready(ready, exactness="kernel", activations=name) for name in ("bf16", "fp32"))
    assert "activations bf16" in unlike(left, right)


FINDINGS = st.builds(
    ClassFinding,
    st.just(CLASS),
    st.booleans(),
    st.just("why"),
    decode_ms=st.floats(0.1, 1e3).map(lambda ms: ((1, ms), (16, 2 * ms))),
    prefill_ms=st.floats(0.0, 1e3),
)


@given(st.lists(FINDINGS, max_size=5).map(tuple), st.floats(0.5, 1.0))
def test_the_class_taken_passed_and_no_other_is_cheaper_by_more_than_the_margin(findings, margin):
    chosen = choose_class(findings, margin)
    passed = [one for one in findings if one.passed]
    assert (chosen < 0) is not bool(passed)
    if chosen < 0:
        return
    taken = findings[chosen]
    assert taken.passed
    assert all(one.mixed_ms >= margin * taken.mixed_ms for one in passed)
    first = next(place for place, one in enumerate(findings) if one.passed)
    assert chosen == first or taken.mixed_ms < margin * findings[first].mixed_ms


@dataclasses.dataclass
class Machine:
    """Runs forwards while others come and go: `loads` are the seconds from which on they take so many times as long."""

    loads: list[tuple[float, float]]
    now_ms: float = 0.0

    def build(self, factor: float):
        """Return what times forwards of a class that costs so many times what the cheapest does."""

        def measure(rows: int) -> float:
            slower = next((slower for from_ms, slower in reversed(self.loads) if from_ms <= self.now_ms), 1.0)
            took_ms = factor * slower * (50.0 if rows == PROMPT else 5.0 + rows)
            self.now_ms += took_ms
            return took_ms

        return measure


def choose_on(machine: Machine, factors: list[float]) -> int:
    costs = time_in_turns([machine.build(factor) for factor in factors])
    findings = [ClassFinding(CLASS, True, "", **cost._asdict()) for cost in costs]
    return choose_class(tuple(findings), CHEAPER)


FACTORS = st.lists(st.sampled_from([1.0, 1.02, 1.2, 1.4, 3.0]), min_size=2, max_size=4)


@given(FACTORS, st.floats(0.0, 3e3), st.floats(0.2, 5.0))
def test_a_load_that_comes_or_goes_while_classes_are_timed_decides_nothing(factors, from_ms, slower):
    chosen = choose_on(Machine([]), factors)
    assert choose_on(Machine([(from_ms, slower)]), factors) == chosen
    assert factors[chosen] * CHEAPER <= min(factors)


@given(st.floats(0.0, 2e3), st.floats(1.5, 5.0))
def test_one_class_after_another_would_be_chosen_by_the_load(from_ms, slower):
    """What the turns are for: timed by itself, the first class has all of the load."""
    machine = Machine([(0.0, slower)])
    (first,) = time_in_turns([machine.build(1.0)])
    machine.loads = []
    (later,) = time_in_turns([machine.build(1.4)])
    findings = [ClassFinding(CLASS, True, "", **cost._asdict()) for cost in (first, later)]
    assert choose_class(tuple(findings), CHEAPER) == 1
    assert choose_on(Machine([(from_ms, slower)]), [1.0, 1.4]) == 0


@dataclasses.dataclass
class Trial:
    """A class that was tried, whose process ends at its `ends_at`th forward."""

    machine: Machine
    factor: float
    ends_at: int = 1_000_000
    needed_bytes: float = 0.0
    closed: int = 0
    finding: ClassFinding = dataclasses.field(default_factory=lambda: ClassFinding(CLASS, True, "sane"))

    def measure_ms(self, rows: int) -> float:
        self.ends_at -= 1
        if self.ends_at < 0:
            raise TrialEnded(self, "its process ended by SIGSEGV")
        return float(self.machine.build(self.factor)(rows))

    def close(self) -> None:
        self.closed += 1


def test_a_class_whose_process_ends_while_it_is_timed_has_not_passed_and_the_others_are_timed_anew():
    machine, trials = Machine([]), TimedTrials()
    opened = [Trial(machine, 1.0, ends_at=7), Trial(machine, 1.4), Trial(machine, 1.2)]
    for trial in opened:
        trials.add(trial)
    trials.add(failed := Trial(machine, 1.0, finding=ClassFinding(CLASS, False, "garbage")))
    assert failed.closed == 1
    trials.time_open()
    assert [one.passed for one in trials.findings] == [False, True, True, False]
    assert trials.findings[0].why == "its process ended by SIGSEGV"
    assert choose_class(tuple(trials.findings), CHEAPER) == 2
    assert [trial.closed for trial in opened] == [1, 1, 1]


def test_where_there_is_no_room_beside_a_class_it_is_timed_before_the_next_one():
    trials = TimedTrials()
    assert trials.leave_room()
    trials.add(Trial(Machine([]), 1.0, needed_bytes=float("inf")))
    assert not trials.leave_room()
    trials.time_open()
    assert trials.findings[0].mixed_ms > 0.0
    assert trials.leave_room()


def test_classes_in_processes_of_their_own_are_beside_each_other_while_they_are_timed(tmp_path, monkeypatch):
    """A real runtime in two of its classes; both are there before either is timed."""
    options = write_tiny_config(tmp_path)
    target, _ = load(options)
    seen: list[int] = []

    def count(measures):
        seen.append(len(measures))
        return time_in_turns(measures)

    monkeypatch.setattr(timed_trials, "time_in_turns", count)
    first = target.model.capabilities.numerical_class
    monkeypatch.setattr(numerical_classes, "list_classes", lambda *_: [[first, first]])
    refreshed, _ = load(options, refresh=True)
    assert seen == [2]
    findings = refreshed.classes.findings
    assert [len(one.rounds_ms) for one in findings] == [3, 3]
    assert {one.fingerprint for one in findings} == {target.class_fingerprint}
    assert all(one.prefill_tokens > 0 for one in findings)


def test_where_two_classes_are_too_much_for_the_memory_they_are_tried_one_after_another(tmp_path, monkeypatch):
    options = write_tiny_config(tmp_path)
    target, _ = load(options)
    first = target.model.capabilities.numerical_class
    alive: list[Trial] = []

    def try_apart(job, tried, on_look):
        if any(not trial.closed for trial in alive):
            raise OutOfMemory("there is no room for two")
        trial = Trial(Machine([]), 1.0)
        trial.finding = dataclasses.replace(target.classes.finding, rounds_ms=())
        alive.append(trial)
        return trial

    monkeypatch.setattr(numerical_classes, "try_apart", try_apart)
    monkeypatch.setattr(numerical_classes, "list_classes", lambda *_: [[first, first]])
    refreshed, _ = load(options, refresh=True)
    assert [len(one.rounds_ms) for one in refreshed.classes.findings] == [3, 3]
    assert all(trial.closed for trial in alive)


@given(st.lists(FINDINGS, min_size=1, max_size=5).map(tuple))
def test_what_is_said_of_classes_names_each_of_them(findings):
    chosen = choose_class(findings, 0.9)
    found = MeasuredClasses("", "a", "d", "m", "", "", "", 1, findings, chosen)
    assert len(describe_rejected(found)) == len(findings) - (chosen >= 0)
    if chosen >= 0:
        assert f"{cost_ratio(found):.2f} times" in describe_choice(found)
