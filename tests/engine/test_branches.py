"""Branches beside drafts change no token, cost nobody a place, and leave nothing behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from device_profiles.cost import StepCost
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.chain import ChainDrafter
from orchestrator.worker.drafting.model import ModelDrafter
from orchestrator.worker.drafting.port import Ask, Draft, Drafter
from policies.sampling import Sampling
from tests.engine.test_drawn_drafts import LENGTH, PROMPT, chances, unlike
from tests.support.branches import FLAT, FlatModel, TurningDrafter, branching_loop, count_branches, last_stats
from tests.support.drafters import texts_of
from tests.support.failing import FailingModel
from tests.support.flights import cut_toy
from tests.support.loops import alone, decode, loop_over, requests, suffix, toy
from tests.support.simulated_time import SimulatedClock

STEEP = StepCost((1.0, 512.0), (30.0, 800.0))


@pytest.fixture(scope="module")
def submits() -> list[Submit]:
    return requests(10)


@pytest.fixture(scope="module")
def expected(submits) -> dict[str, list[int]]:
    return alone(submits)


def draft_model(agree: float, clock: SimulatedClock | None = None) -> ModelDrafter:
    """A draft model that is right so often, and takes a tenth of the target's time."""
    model = FlatModel(FLAT.scale_by(0.1), f"agree={agree}", clock)
    return ModelDrafter(model, DrafterState("small", "model"), model.clock, vocabulary=272, prefill_ms=50.0)


@pytest.mark.parametrize("running", [1, 3, 8])
@pytest.mark.parametrize("kind", ["suffix", "model", "chain", "turning"])
def test_identity_with_target_only_decoding(submits, expected, running, kind):
    texts = texts_of(submits, expected)
    drafters: dict[str, Callable[[], Drafter]] = {
        "suffix": suffix,
        "model": lambda: draft_model(0.5),
        "chain": lambda: ChainDrafter([suffix(), draft_model(0.4)]),
        "turning": lambda: TurningDrafter(texts, wrong_every=2),
    }
    model = FlatModel()
    out, rounds = decode(branching_loop(model, drafters[kind](), running=running), submits)
    assert out == expected
    verified, taken = count_branches(rounds)
    assert 0 < taken < verified
    assert model.free_blocks() == model.capabilities.total_blocks


@pytest.mark.parametrize("kind", ["model", "chain"])
def test_they_make_more_tokens_in_the_same_time_than_the_best_chain(kind):
    """In simulated time, of which every forward takes what its cost says."""

    def measure_rate(branches: bool) -> float:
        model = FlatModel()
        drafter = draft_model(0.6, model.clock)
        chain = drafter if kind == "model" else ChainDrafter([suffix(), drafter])
        began_s = model.clock.now_s
        out, _ = decode(branching_loop(model, chain, branches=branches, running=1), requests(6, max_tokens=120))
        return sum(map(len, out.values())) / (model.clock.now_s - began_s)

    assert measure_rate(True) > 1.03 * measure_rate(False)


@pytest.mark.parametrize(("slots", "rows", "blocks"), [(4, 24, 4096), (8, 9, 4096), (8, 256, 26), (3, 256, 4096)])
def test_branches_take_what_is_left_of_slots_rows_and_blocks(submits, expected, slots, rows, blocks):
    """The model refuses a forward that breaks its bounds."""
    model = toy(slots=slots, rows=rows, kv_blocks=blocks)
    drafter = TurningDrafter(texts_of(submits, expected), wrong_every=2)
    out, rounds = decode(branching_loop(model, drafter, running=3), submits)
    assert out == expected
    assert count_branches(rounds)[0] > 0, "the last ones run alone"
    assert model.free_blocks() == model.capabilities.total_blocks


@pytest.mark.parametrize("most_rows", [4, 12])
def test_a_forward_without_memory_ends_its_branches(submits, expected, most_rows):
    inner = toy()
    model = FailingModel(inner)
    model.most_rows = most_rows
    loop = branching_loop(model, TurningDrafter(texts_of(submits, expected), wrong_every=2), running=3)
    assert decode(loop, submits)[0] == expected
    assert model.failed
    assert inner.free_blocks() == inner.capabilities.total_blocks


def test_a_request_that_is_cancelled_while_its_branches_run_leaves_nothing(submits, expected, tmp_path):
    """Of a target in stages, whose forwards run while the loop hears of the cancellation."""
    model = cut_toy(tmp_path)
    loop = branching_loop(model, TurningDrafter(texts_of(submits, expected), wrong_every=2), running=3)
    for submit in submits[:3]:
        loop.submit(submit)
    out: dict[str, list[int]] = {}
    cancelled = False
    while not loop.idle:
        loop.begin_round()
        held = sum(model.count_cached_positions(slot) > 0 for slot in range(8))
        if not cancelled and held > 3 and len(out["r1"]) > 9:
            loop.cancel("r1")
            cancelled = True
        for delta in loop.finish_round().deltas:
            out.setdefault(delta.request_id, []).extend(delta.tokens)
        held = sum(model.count_cached_positions(slot) > 0 for slot in range(8))
        assert held == loop.scheduler.running, "forks end with their round"
    assert cancelled
    part = out.pop("r1")
    assert part == expected["r1"][: len(part)]
    assert out == {key: expected[key] for key in ("r0", "r2")}
    assert model.free_blocks() == model.capabilities.total_blocks
    model.close()


def test_what_was_branched_is_remembered_for_the_next_turn(submits, expected):
    """A conversation goes on behind its answer, of which a fork has fixed blocks."""
    first = submits[8]
    loop = branching_loop(toy(), TurningDrafter(texts_of([first], expected), wrong_every=2))
    out, rounds = decode(loop, [first])
    assert count_branches(rounds)[1] > 0
    held = [*first.prompt, *out[first.request_id]]
    _, rounds = decode(loop, [Submit("next", [*held, 32, 101], 4, Sampling())])
    assert last_stats(rounds)[0].reused >= len(held) - 1 - 16


def test_the_output_is_distributed_as_the_targets():
    sampling = [Sampling(1.0, top_k=3, seed=seed) for seed in range(1200)]
    submits = [Submit(str(one.seed), PROMPT, LENGTH, one) for one in sampling]
    out, rounds = decode(branching_loop(FlatModel(), draft_model(0.4), running=1), submits)
    assert count_branches(rounds)[1] > 50
    counts = Counter(tuple(tokens) for tokens in out.values())
    assert unlike(counts, chances(sampling[0], LENGTH)) > 1e-3


@pytest.mark.parametrize(
    ("cost", "fields"),
    [
        (STEEP, {}),
        (FLAT, {"depth": 4}),
        (FLAT, {"sampling": Sampling(0.9, seed=1, acceptance="rejection")}),
        (FLAT, {"sampling": Sampling(0.9, seed=1, frequency_penalty=0.5)}),
    ],
)
def test_there_are_none_where_rows_are_dear_or_what_is_chosen_depends_on_drafts(cost, fields):
    heard: list[bool] = []

    class Hearing(TurningDrafter):
        def propose(self, asks: Sequence[Ask]) -> list[Draft]:
            heard.extend(ask.alternatives for ask in asks)
            return super().propose(asks)

    submit = Submit(**({"request_id": "a", "prompt": PROMPT, "max_tokens": 40, "sampling": Sampling()} | fields))
    truth = decode(loop_over(toy(), None), [submit])[0]
    _, rounds = decode(branching_loop(toy(), Hearing(texts_of([submit], truth), wrong_every=2), cost), [submit])
    assert heard
    assert not any(heard)
    assert count_branches(rounds) == (0, 0)
