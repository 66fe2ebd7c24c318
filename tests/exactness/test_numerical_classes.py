"""How a numerical class is chosen: measured once on a device, kept, and never one that was not shown to hold."""

from __future__ import annotations

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.contract import ModelRefused
from adapters.libllama import VARIABLE, find_mainline
from device_profiles.numerical_class import MIXED_ROWS, ClassFinding, MeasuredClasses, NumericalClass, choose_class
from device_profiles.profile import Precision
from device_profiles.store import ProfileStore
from orchestrator.config.load import load_config
from orchestrator.daemon.control.state import unlike
from orchestrator.fitting.worker_options import engine_options
from orchestrator.machine.devices import class_mark_of, find_device, join_marks, threads_on
from orchestrator.worker.loading.class_words import cost_ratio, describe_choice, describe_rejected
from orchestrator.worker.loading.engine import NOTHING_KNOWN, ready_of
from orchestrator.worker.loading.models import load_target
from tests.support.conformance import NO_FORK, NO_MAINLINE
from tests.support.llama_vocabulary import MAINLINE
from tests.support.ready import change_ready
from tests.support.tiny_gguf import Tiny, write

_CHECKED = "check that output does not depend on the batch: "
WORDS = (*map(chr, range(33, 126)), "xy")
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
    wide = NumericalClass(Precision.FP32, Precision.FP32, fixed_width=16)
    found = dataclasses.replace(target.classes.findings[0], numerical_class=wide)
    (tmp_path / "store" / "profiles" / "classes").rename(tmp_path / "store" / "profiles" / "before")
    store.save(dataclasses.replace(target.classes, threads=target.classes.threads + 3, findings=(found,)))
    again, tried = load(options)
    assert tried == [str(wide)]
    assert again.model.capabilities.numerical_class == wide


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


@given(st.lists(FINDINGS, min_size=1, max_size=5).map(tuple))
def test_what_is_said_of_classes_names_each_of_them(findings):
    chosen = choose_class(findings, 0.9)
    found = MeasuredClasses("", "a", "d", "m", "", "", "", 1, findings, chosen)
    assert len(describe_rejected(found)) == len(findings) - (chosen >= 0)
    if chosen >= 0:
        assert f"{cost_ratio(found):.2f} times" in describe_choice(found)
