"""What a target and a draft are predicted to do together, in cases that can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_profiles.cost import StepCost
from device_profiles.link import LinkProfile
from device_profiles.profile import Exactness
from policies.planning.plan import DrafterFacts, ModelFacts, Option, Role, Workload
from policies.planning.shard_cost import ModelPart
from policies.planning.throughput import DraftSide, TargetSide, best_depth, predict, verify_ms

MODEL = ModelFacts("m", 10, hidden_bytes=1000.0)
FLAT = Option("p", Role.TARGET, "m", "runtime", "bf16", StepCost((1.0, 2.0), (10.0, 10.0)), 1e6, 0.0)
DRAFT = replace(FLAT, role=Role.DRAFT, cost=StepCost((1.0, 2.0), (2.0, 2.0)))
LOAD = Workload(MODEL, (), 1, 1, 1000, depth_bound=8)
TARGET = TargetSide((ModelPart(FLAT),))
SURE = DrafterFacts("sure", (1.0,), MODEL)
LINK = LinkProfile("a", "b", 1.0, float("inf"))


def round_of(draft: DraftSide | None, depth: int, target: TargetSide = TARGET, load: Workload = LOAD) -> float:
    prediction = predict(target, draft, load, depth)
    return prediction.round_ms - prediction.prefill_ms


def test_one_after_the_other_is_the_sum_and_beside_each_other_the_longer() -> None:
    assert round_of(DraftSide(SURE, ModelPart(DRAFT)), 3) == pytest.approx(10.0 + 3 * 2.0)
    assert round_of(DraftSide(SURE, ModelPart(DRAFT), True, LINK), 3) == pytest.approx(10.0), (
        "a line runs ahead of its link"
    )
    assert round_of(DraftSide(SURE, ModelPart(DRAFT), True, LINK), 8) == pytest.approx(8 * 2.0)


def test_drafts_made_ahead_count_as_far_as_they_follow_the_verification() -> None:
    half = replace(SURE, acceptance=(1.0, 1.0, 1.0, 0.5))
    assert round_of(DraftSide(half, ModelPart(DRAFT), True, LINK), 3) == pytest.approx(0.5 * 10.0 + 0.5 * (16.0 + 1.0))
    never = replace(SURE, acceptance=(1.0, 1.0, 1.0, 0.0))
    assert round_of(DraftSide(never, ModelPart(DRAFT), True, LINK), 3) == pytest.approx(16.0 + 1.0)


def test_two_readers_of_one_memory_are_no_faster_than_the_memory() -> None:
    shared = DraftSide(SURE, ModelPart(DRAFT), True, LINK, shared_bandwidth_bytes_per_s=1e9)
    assert round_of(shared, 3) == pytest.approx((10 + 3 * 10) * 1e6 / 1e9 * 1000)


def test_goodput_is_tokens_over_rounds_and_their_share_of_prefill() -> None:
    prediction = predict(TARGET, None, replace(LOAD, output_tokens=10), 0)
    assert prediction.goodput_tokens_per_s == pytest.approx(1000 / (10.0 + 10.0 / 10))
    assert prediction.tpot_ms == pytest.approx(10.0)
    drafted = predict(
        TARGET,
        DraftSide(
            DrafterFacts("text", (0.5,)),
        ),
        LOAD,
        2,
    )
    assert drafted.tokens_per_round == pytest.approx(1.75)
    rare = predict(TARGET, DraftSide(DrafterFacts("text", (0.5,), coverage=0.5)), LOAD, 2)
    assert rare.tokens_per_round == pytest.approx(1.375)


def test_other_work_on_a_device_stretches_everything_on_it() -> None:
    busy = TargetSide((ModelPart(FLAT, 1.0, 0.5),))
    assert predict(busy, None, LOAD, 0).goodput_tokens_per_s == pytest.approx(
        predict(TARGET, None, LOAD, 0).goodput_tokens_per_s / 2
    )


def test_bit_exactness_charges_for_its_rows() -> None:
    steep = replace(FLAT, cost=StepCost((1.0, 2.0), (10.0, 14.0)), min_rows=2)
    target = TargetSide((ModelPart(steep),))
    assert verify_ms(target, LOAD, 0) == pytest.approx(14.0)
    assert verify_ms(target, replace(LOAD, exactness=Exactness.KERNEL), 0) == pytest.approx(10.0)


def test_one_stream_waits_for_the_sum_of_the_shards_and_many_for_the_slowest() -> None:
    halves = TargetSide((ModelPart(FLAT, 0.6), ModelPart(FLAT, 0.4)), (LINK, LINK))
    assert verify_ms(halves, LOAD, 0) == pytest.approx(6.0 + 4.0 + 0.5 + 0.5)
    two = replace(halves, sequences=2)
    assert verify_ms(two, LOAD, 0, micro_batches=2) == pytest.approx(2 * 6.0)
    prediction = predict(two, None, LOAD, 0)
    assert prediction.micro_batches == 1  # both at once cost no more than one here
    by_row = replace(FLAT, cost=StepCost((1.0, 2.0), (10.0, 20.0)))
    apart = TargetSide((ModelPart(by_row, 0.6), ModelPart(by_row, 0.4)), (LINK, LINK), 2)
    assert predict(apart, None, LOAD, 0).micro_batches == 2


@pytest.mark.parametrize(("acceptance", "depth"), [(0.0, 0), (0.3, 1), (0.9, 7)])
def test_the_depth_follows_acceptance_down_to_not_speculating(acceptance: float, depth: int) -> None:
    prediction = best_depth(TARGET, DraftSide(DrafterFacts("d", (acceptance,), MODEL), ModelPart(DRAFT)), LOAD)
    assert prediction.depth == depth
    assert prediction.goodput_tokens_per_s >= prediction.plain_tokens_per_s


def test_a_draft_costs_the_rows_that_are_offered_not_those_that_are_allowed() -> None:
    """6 of 10 rounds have a draft, 3 of 10 a second token: 0.4 T(1) + 0.3 T(2) + 0.3 T(3)."""
    steep = replace(FLAT, cost=StepCost((1.0, 2.0, 3.0), (10.0, 12.0, 20.0)))
    text = DrafterFacts("text", (0.5,), coverage=0.6, offered=(0.6, 0.3, 0.0), token_ms=1.0)
    side = TargetSide((ModelPart(steep),))
    verify = 0.4 * 10.0 + 0.3 * 12.0 + 0.3 * 20.0
    for depth in (2, 3, 8):  # deeper than what is offered costs no more
        assert round_of(DraftSide(text), depth, side) == pytest.approx(verify + 0.9)
    assert round_of(DraftSide(text), 1, side) == pytest.approx(0.4 * 10.0 + 0.6 * 12.0 + 0.6)


def test_a_policys_figures_are_looked_at_with_its_own_bound_only() -> None:
    steep = replace(FLAT, cost=StepCost((1.0, 9.0), (10.0, 50.0)))
    target = TargetSide((ModelPart(steep),))
    free = DrafterFacts("text", (0.9, 0.05), coverage=1.0, offered=(1.0,))
    assert best_depth(target, DraftSide(free), LOAD).depth == 1
    deep = best_depth(target, DraftSide(replace(free, by_policy=True)), LOAD)
    assert deep.depth == 0, "with its own bound it is slower than no drafts"
    kept = DrafterFacts("text", (0.9, 0.9, 0.9), coverage=0.5, offered=(0.5, 0.5, 0.2, 0.0), by_policy=True)
    prediction = best_depth(TARGET, DraftSide(kept), LOAD)
    assert prediction.depth == 2, "what its drafts have on average"
    whole = predict(TARGET, DraftSide(kept), LOAD, LOAD.depth_bound)
    assert prediction.goodput_tokens_per_s == whole.goodput_tokens_per_s


@given(st.floats(0.0, 1.0), st.floats(0.0, 10.0), st.integers(1, 8))
def test_rounds_whose_rows_change_take_longer_by_what_changing_costs(share: float, ms: float, sequences: int) -> None:
    changing = replace(FLAT, cost=replace(FLAT.cost, changing_ms=ms))
    target = TargetSide((ModelPart(changing),), (), sequences)
    text = DrafterFacts("text", (0.5,), changes=share)
    steady = round_of(DraftSide(replace(text, changes=0.0)), 2, target)
    changes = 1.0 - (1.0 - share) ** sequences
    assert round_of(DraftSide(text), 2, target) == pytest.approx(steady + changes * ms)
    assert round_of(None, 0, target) == pytest.approx(round_of(None, 0, TargetSide((ModelPart(FLAT),), (), sequences)))


def test_a_prompt_beside_others_is_charged_what_it_adds() -> None:
    prompts = replace(FLAT, cost=replace(FLAT.cost, prefill=StepCost((10.0, 20.0), (15.0, 25.0))))
    load = replace(LOAD, prompt_tokens=20, output_tokens=10)
    alone = predict(TargetSide((ModelPart(prompts),)), None, load, 0)
    assert alone.prefill_ms == pytest.approx(25.0 / 10)
    four = predict(TargetSide((ModelPart(prompts),), (), 4), None, load, 0)
    assert four.prefill_ms == pytest.approx(4 * 20.0 / 10)
    assert four.ttft_ms >= 25.0


@pytest.mark.parametrize(
    ("prompt", "output", "fixed", "read"),
    [
        (1000, 100, False, 100),
        (1000, 10, False, 64),
        (50, 100, False, 50),
        (1000, 2000, False, 1000),
        (1000, 100, True, 1000),
    ],
)
def test_a_draft_is_charged_what_it_reads_of_a_prompt(prompt: int, output: int, fixed: bool, read: int) -> None:
    """A token takes 1 ms to read; a draft beside the target reads while that computes."""
    reader = ModelPart(replace(DRAFT, cost=replace(DRAFT.cost, prefill=StepCost((1.0, 2.0), (1.0, 2.0)))))
    load = replace(LOAD, prompt_tokens=prompt, output_tokens=output, drafts_read_all=fixed)
    plain, apart, beside = (
        predict(TARGET, draft, load, 1)
        for draft in (None, DraftSide(SURE, reader), DraftSide(SURE, reader, overlap=True, link=LINK))
    )
    assert apart.prefill_ms - beside.prefill_ms == pytest.approx(apart.tokens_per_round / output * read)
    assert beside.prefill_ms == pytest.approx(beside.tokens_per_round * plain.prefill_ms)


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.integers(1, 8))
def test_a_draft_that_is_less_sure_than_its_target_makes_the_prediction_less_sure(
    of_target: float, of_draft: float, depth: int
) -> None:
    target = TargetSide((ModelPart(replace(FLAT, cost=replace(FLAT.cost, error=of_target))),))
    draft = DraftSide(SURE, ModelPart(replace(DRAFT, cost=replace(DRAFT.cost, error=of_draft))))
    error = predict(target, draft, LOAD, depth).error
    assert of_target <= error <= max(of_target, of_draft)
    assert (error > of_target) == (of_draft > of_target) or error == pytest.approx(of_target)
    assert predict(target, draft, LOAD, 0).error == of_target
