"""The choice of number formats: never over memory, never against exactness, the same for the same facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from device_profiles.profile import DRAFT, FAST, DeviceProfile, Exactness, Precision
from policies.models.quantization import (
    AS_FILE,
    AUTO,
    MeasuredWeights,
    ModelSizes,
    NoPrecision,
    PrecisionChoice,
    PrecisionRequest,
    choose_precision,
    weights_bytes,
)

ALL = tuple(Precision)
BF16_FILE = ModelSizes(parameters=1_000_000, file_bytes=2_000_000, stored="bf16")


def device(kind: str = "cpu", **changes) -> DeviceProfile:
    values: dict[str, Any] = {
        "adapter": "openvino_rt",
        "name": kind.upper(),
        "kind": kind,
        "full_name": kind,
        "memory_bytes": 0,
        "precisions": (Precision.BF16, Precision.FP32),
        "weights": ALL,
        "kv_cache": (Precision.BF16, Precision.FP16, Precision.INT8),
        "exact_kv_cache": (Precision.BF16, Precision.FP16),
    }
    return DeviceProfile(**(values | changes))


devices = st.builds(
    device,
    kind=st.sampled_from(["cpu", "gpu", "npu", "cuda", "qnn"]),
    precisions=st.sets(st.sampled_from([Precision.BF16, Precision.FP16, Precision.FP32])).map(tuple),
    weights=st.lists(st.sampled_from(ALL), unique=True).map(tuple),
    kv_cache=st.lists(st.sampled_from([Precision.BF16, Precision.FP16, Precision.FP32, Precision.INT8]), unique=True)
    .filter(lambda found: found != [Precision.INT8])
    .map(tuple),
    exact_kv_cache=st.just(()) | st.just((Precision.INT8,)),
    has_draft=st.booleans(),
)
models = st.builds(
    ModelSizes,
    st.integers(1, 10**11),
    st.integers(1, 10**11),
    st.just("bf16"),
    st.just(0) | st.integers(1, 10**11),
    st.booleans(),
    st.just(0) | st.integers(1, 10**11),
)
names = st.sampled_from([AS_FILE, FAST, DRAFT, *(precision.value for precision in ALL)])
figures = st.lists(
    st.builds(MeasuredWeights, names, st.floats(0.1, 100), st.floats(0, 1)),
    max_size=6,
    unique_by=lambda one: one.weights,
)
requests = st.builds(
    PrecisionRequest,
    weights=st.just(AUTO) | names,
    activations=st.sampled_from([AUTO, "fp32", "bf16", "fp16"]),
    kv_cache=st.sampled_from([AUTO, "16bit", "8bit"]),
    exactness=st.sampled_from(Exactness),
    drafts=st.booleans(),
)


def choose_or_none(*facts, **keywords) -> PrecisionChoice | None:
    """The choice; None where it is refused, which always has a reason."""
    try:
        return choose_precision(*facts, **keywords)
    except NoPrecision as refusal:
        return None if str(refusal) else pytest.fail("refused without a reason")


@given(devices, models, figures, requests, st.integers(0, 10**12), st.integers(0, 10**10))
def test_what_is_chosen_fits_is_offered_and_keeps_exactness(at, model, measured, wanted, free, other):
    choice = choose_or_none(at, model, measured, wanted, free_bytes=free, other_bytes=other)
    if choice is None:
        return
    assert weights_bytes(model, choice.weights) + other <= free
    assert choice.weights in (AS_FILE, FAST, DRAFT, *at.weights)
    assert choice.weights != FAST or wanted.weights == FAST  # it is never chosen unasked
    if choice.weights == DRAFT:
        assert at.has_draft
        assert model.draft_bytes
        assert wanted.drafts or wanted.weights == DRAFT  # nor is this for a target
    assert wanted.weights in (AUTO, choice.weights)
    assert wanted.activations in (AUTO, choice.activations)
    if {Precision.BF16, Precision.FP16} & set(at.kv_cache):
        assert (choice.kv_cache is Precision.INT8) == (wanted.kv_cache == "8bit")
    if wanted.kv_cache == "8bit" and wanted.exactness is Exactness.BIT:
        assert Precision.INT8 in at.exact_kv_cache
    assert choice.reason


@given(devices, models, figures, requests)
def test_the_same_facts_give_the_same_choice_in_any_order(at, model, measured, wanted):
    choice = choose_or_none(at, model, measured, wanted)
    if choice is None:
        return
    assert choice == choose_precision(at, model, measured, wanted)
    again = choose_precision(at, model, measured[::-1], wanted)
    assert (again.weights, again.reason) == (choice.weights, choice.reason)


@given(devices, models, figures)
def test_every_alternative_is_chosen_or_rejected_with_a_reason(at, model, measured):
    choice = choose_precision(at, model, measured)
    explained = {rejection.what for rejection in choice.rejected if not rejection.what.startswith("KV")}
    npu, gpu = {"int8", "int4"}, {"bf16", "fp16", "fp8", "int8", "int4"}
    preferred = {"npu": npu, "qnn": npu, "gpu": gpu, "cuda": gpu, "cpu": {precision.value for precision in ALL}}
    offered = {precision.value for precision in at.weights} & preferred[at.kind]
    assert choice.weights not in explained
    assert explained | {choice.weights} == offered | {AS_FILE}
    assert all(rejection.why for rejection in choice.rejected)


@given(
    models,
    *[st.builds(MeasuredWeights, st.just(name), st.floats(0.1, 100), st.floats(0, 1)) for name in (DRAFT, AS_FILE)],
)
def test_a_draft_takes_what_drafts_more_in_its_time(model, small, own):
    sizes = replace(model, draft_bytes=int(0.8 * weights_bytes(model, AS_FILE)) + 1)
    assume(sizes.draft_bytes <= 0.9 * weights_bytes(model, AS_FILE))
    choice = choose_precision(device(has_draft=True), sizes, [small, own], PrecisionRequest(drafts=True))
    assert (choice.weights == DRAFT) == (small.agreement / small.step_ms >= own.agreement / own.step_ms)


def test_a_draft_that_nobody_measured_takes_its_own_copy_where_that_is_smaller():
    at, sizes = device(has_draft=True), replace(BF16_FILE, draft_bytes=700_000)
    wanted = PrecisionRequest(drafts=True)
    choice = choose_precision(at, sizes, wanted=wanted)
    assert choice.weights == DRAFT
    assert "683.6 KiB and not 1.9 MiB" in choice.reason
    for other in (replace(sizes, draft_bytes=1_900_000), replace(sizes, draft_bytes=0)):
        assert choose_precision(at, other, wanted=wanted).weights == AS_FILE
    assert choose_precision(at, sizes, wanted=wanted, free_bytes=690_000).weights == "int4"
    with pytest.raises(NoPrecision, match="made of GGUF files alone"):
        choose_precision(at, BF16_FILE, wanted=PrecisionRequest(DRAFT, drafts=True))


@given(models, figures, st.floats(0, 1))
def test_a_cpu_takes_what_was_measured_fastest_among_what_keeps_enough_choices(model, measured, floor):
    assume(any(one.weights == AS_FILE for one in measured))
    choice = choose_precision(device(), model, measured, PrecisionRequest(least_agreement=floor))
    unasked = [one for one in measured if one.weights not in (FAST, DRAFT)]
    allowed = [one for one in unasked if one.weights == AS_FILE or one.agreement >= floor]
    assert choice.weights in {one.weights for one in allowed}
    found = next(one for one in allowed if one.weights == choice.weights)
    assert found.step_ms == min(one.step_ms for one in allowed)


def test_a_cpu_takes_the_file_as_it_is_until_something_was_measured():
    choice = choose_precision(device(), BF16_FILE)
    assert choice.weights == AS_FILE
    assert "not compared with other formats" in choice.reason
    assert {rejection.what for rejection in choice.rejected} == {
        *(precision.value for precision in ALL),
        "KV cache int8",
    }
    # A variant alone is no comparison.
    assert choose_precision(device(), BF16_FILE, [MeasuredWeights("int8", 1.0, 1.0)]).weights == AS_FILE


def test_an_npu_gets_int8_and_a_gpu_16_bits_while_they_fit():
    assert choose_precision(device("npu"), BF16_FILE).weights == "int8"
    assert choose_precision(device("gpu"), BF16_FILE).weights == "bf16"
    assert choose_precision(device("cuda", weights=(Precision.FP16, Precision.INT4)), BF16_FILE).weights == "fp16"
    small = choose_precision(device("gpu"), BF16_FILE, free_bytes=weights_bytes(BF16_FILE, "int4"))
    assert small.weights == "int4"
    assert "needs" in next(rejection.why for rejection in small.rejected if rejection.what == "bf16")


def test_fast_says_what_it_costs_measured_or_not_and_where_it_costs_nothing():
    wanted, offsets = (
        PrecisionRequest(weights=FAST),
        ModelSizes(1_000_000, 600_000, "int8 (Q4_1's values)", 1_100_000, rounds=True),
    )
    assert "perplexity x 1.15" in choose_precision(device(), offsets, wanted=wanted).reason
    told = choose_precision(device(), offsets, [MeasuredWeights(FAST, 1.0, 0.75, 1.206)], wanted)
    assert "perplexity x 1.206 and 75.0% of the greedy choices, measured here" in told.reason
    assert told.weights == FAST
    assert weights_bytes(offsets, FAST) == 600_000
    assert "the same as as_file" in choose_precision(device(), BF16_FILE, wanted=wanted).reason


def test_what_a_file_takes_is_what_runtimes_hold_of_it():
    offsets = ModelSizes(1_000_000, 600_000, "int8 (Q4_1's values)", 1_100_000, rounds=True)
    assert weights_bytes(offsets, choose_precision(device(), offsets, free_bytes=1_100_000).weights) == 1_100_000
    assert (
        choose_precision(device(weights=()), offsets, wanted=PrecisionRequest(weights=FAST), free_bytes=600_000).weights
        == FAST
    )
    with pytest.raises(NoPrecision, match="as_file: needs"):
        choose_precision(device(weights=()), offsets, free_bytes=1_000_000)


def test_requests_that_cannot_be_met_say_why_and_what_can():
    with pytest.raises(NoPrecision, match=r"int8: .* there are as_file, fast, fp32"):
        choose_precision(device(weights=(Precision.FP32,)), BF16_FILE, wanted=PrecisionRequest(weights="int8"))
    with pytest.raises(NoPrecision, match="exactness: kernel"):
        choose_precision(device(), BF16_FILE, wanted=PrecisionRequest(kv_cache="8bit"))
    with pytest.raises(NoPrecision, match=r"16bit: .* is fp32"):
        choose_precision(device(kv_cache=(Precision.FP32,)), BF16_FILE, wanted=PrecisionRequest(kv_cache="16bit"))
    with pytest.raises(NoPrecision, match="computes in bf16, fp32"):
        choose_precision(device(), BF16_FILE, wanted=PrecisionRequest(activations="fp16"))
    with pytest.raises(NoPrecision, match="needs"):
        choose_precision(device(), BF16_FILE, free_bytes=10)
    wanted = PrecisionRequest(kv_cache="8bit", exactness=Exactness.KERNEL)
    assert choose_precision(device(), BF16_FILE, wanted=wanted).kv_cache is Precision.INT8
