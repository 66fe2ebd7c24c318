"""Rejection and tolerance through the decode loop, with a draft model that disagrees with the target."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from adapters.contract import ForwardResult, LoadOptions, Segment
from adapters.simulated.model import ToyModel
from adapters.simulated.script import Script
from adapters.tokenizer import Tokenizer
from orchestrator.clock import SystemClock
from orchestrator.protocol.commands import Grammar, Submit
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.chain import ChainDrafter
from orchestrator.worker.drafting.guard import FailedDrafter
from orchestrator.worker.drafting.model import ModelDrafter
from orchestrator.worker.drafting.port import Draft, Drafter
from orchestrator.worker.engine.loop import DecodeLoop
from policies.sampling import DraftDistribution, Sampling, ToleranceGoal, distribution
from tests.support.loops import decode, grammars_over, loop_over, suffix, toy

STATE = DrafterState("model", "model", adapter="simulated", device="SIM")
PROMPT = [60, 32, 101]
LENGTH = 4
SEEDS = 1500


class OtherModel(ToyModel):
    """The toy model with other opinions."""

    def __init__(self, strength: float) -> None:
        super().__init__(Script(), LoadOptions(device="SIM", kv_cache_bytes=16 << 20, max_batch_rows=256, slots=16))
        self._opinions = np.random.default_rng(3).normal(0.0, strength, 272).astype(np.float32)

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        found = super().forward(batch)
        return ForwardResult(found.logits + self._opinions, found.device_ms)


class FewOutputs(OtherModel):
    """The same where it can say every second token only: the others have a probability of 0 in its drafts."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.spec = replace(self.spec, output_ids=tuple(range(0, self.spec.vocabulary_size, 2)))

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        found = super().forward(batch)
        return ForwardResult(found.logits[:, ::2], found.device_ms)


class DearModel(ToyModel):
    """The toy model, and a forward of it takes so long that any draft pays. It is the clock that tells so, too."""

    def __init__(self) -> None:
        self._took_s = 0.0
        super().__init__(Script(), LoadOptions(device="SIM", kv_cache_bytes=64 << 20, max_batch_rows=256, slots=16))

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        self._took_s += 10.0
        return ForwardResult(super().forward(batch).logits, device_ms=1e4)

    def monotonic_s(self) -> float:
        return time.perf_counter() + self._took_s

    def wall_s(self) -> float:
        return time.time()


def dear_loop(drafter: Drafter, **settings: Any) -> DecodeLoop:
    model = DearModel()
    return loop_over(model, drafter, clock=model, **settings)


def draft_model(strength: float = 1.0, model: OtherModel | None = None) -> ModelDrafter:
    model = model or OtherModel(strength)
    return ModelDrafter(model, STATE, SystemClock(), vocabulary=272, prefill_ms=50.0)


def submits(rule: str, count: int, *, max_tokens: int = LENGTH, depth: int | None = 3, **sampling) -> list[Submit]:
    return [
        Submit(
            request_id=f"{seed}",
            prompt=PROMPT,
            max_tokens=max_tokens,
            sampling=Sampling(seed=seed, acceptance=rule, **{"temperature": 1.0, "top_k": 3, **sampling}),  # type: ignore[arg-type]
            depth=depth,
        )
        for seed in range(count)
    ]


def chances(sampling: Sampling, length: int) -> dict[tuple[int, ...], float]:
    """The target's probability of every output."""
    model = toy()
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for size in range(length):
        grown: dict[tuple[int, ...], float] = {}
        for taken, chance in known.items():
            row = model.forward([Segment(0, 0, PROMPT, (len(PROMPT) - 1, len(PROMPT)), apart=False)]).logits[0]
            for index in range(size):  # rows behind a short prompt are a class of their own
                row = model.forward([Segment(0, len(PROMPT) + index, [taken[index]], (0, 1), apart=True)]).logits[0]
            for token, share in zip(*distribution(row, sampling, 0), strict=True):
                grown[(*taken, int(token))] = chance * float(share)
        known = grown
    return known


def unlike(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """The p-value of a chi-square test; outputs that are hardly expected are taken together."""
    from scipy import stats  # here: whoever only collects tests needs no second for it

    total = sum(counts.values())
    often = [output for output, chance in expected.items() if chance * total >= 5]
    assert not set(counts) - set(expected)
    seen = [counts[output] for output in often]
    wanted = [expected[output] * total for output in often]
    seen, wanted = [*seen, total - sum(seen)], [*wanted, total - sum(wanted)]
    return float(stats.chisquare(seen, wanted).pvalue)


def drafters() -> dict[str, Drafter]:
    return {
        "model": draft_model(),
        "some outputs": draft_model(model=FewOutputs()),
        "suffix": suffix(),
        "chain": ChainDrafter([suffix(), draft_model(0.3), draft_model(2.0)]),
    }


@pytest.mark.parametrize("name", drafters())
@pytest.mark.parametrize("depth", [3, None])
def test_the_output_is_distributed_as_the_targets(name, depth):
    """Over as many seeds as show a draft that is believed; drafts of a fixed depth, and those that the policy cuts."""
    asked = submits("rejection", SEEDS, depth=depth)
    out, rounds = decode(dear_loop(drafters()[name]), asked)
    drafted, accepted = sum(done.drafted for done in rounds), sum(done.accepted for done in rounds)
    assert 0.1 * drafted < accepted < 0.95 * drafted
    counts = Counter(tuple(tokens) for tokens in out.values())
    assert unlike(counts, chances(asked[0].sampling, LENGTH)) > 1e-3


def test_the_chi_square_test_sees_a_draft_that_is_believed():
    asked = submits("tolerance", SEEDS)
    loop = loop_over(toy(), draft_model(), tolerance=ToleranceGoal(0.99, 16, 5.0))
    counts = Counter(tuple(tokens) for tokens in decode(loop, asked)[0].values())
    assert unlike(counts, chances(asked[0].sampling, LENGTH)) < 1e-6


def rate_of(loop: DecodeLoop, asked: list[Submit]) -> tuple[float, dict[str, list[int]]]:
    out, rounds = decode(loop, asked)
    return sum(done.accepted for done in rounds) / sum(done.drafted for done in rounds), out


def test_rejection_accepts_more_than_coupled_and_tolerance_more_than_both():
    rates = {
        rule: rate_of(loop_over(toy(), draft_model()), submits(rule, 300, depth=1, max_tokens=8, top_k=0))[0]
        for rule in ("coupled", "rejection", "tolerance")
    }
    assert rates["coupled"] < rates["rejection"] < rates["tolerance"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tolerance_learns_from_a_warm_up_and_says_what_it_found(temperature):
    goal = ToleranceGoal(acceptance_rate=0.8, warmup_tokens=200, max_delta=20.0)
    loop = dear_loop(draft_model(), tolerance=goal, running=1)
    kind = "sampled" if temperature else "greedy"

    def tolerant(count: int, last: int, *, max_tokens: int, depth: int | None = None) -> list[Submit]:
        sampling = [Sampling(temperature, seed=seed, acceptance="tolerance") for seed in range(count)]
        return [Submit(f"{last}-{one.seed}", [60 + one.seed, last], max_tokens, one, depth=depth) for one in sampling]

    first, *more = tolerant(40, 32, max_tokens=20)
    assert read_tolerance(loop, first) == -1.0
    assert loop.gauges(0).tolerance_deltas == {}
    decode(loop, more)
    found = loop.gauges(0).tolerance_deltas
    assert list(found) == [kind]
    assert rate_of(loop, tolerant(40, 101, max_tokens=40, depth=1))[0] == pytest.approx(0.8, abs=0.12)
    assert loop.gauges(0).tolerance_deltas == found
    assert read_tolerance(loop, tolerant(1, 32, max_tokens=20)[0]) == found[kind]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_fixed_tolerance_holds_from_the_first_draft_on(temperature):
    goal = ToleranceGoal(acceptance_rate=0.8, warmup_tokens=16, max_delta=20.0, fixed_delta=1.5)
    loop = dear_loop(draft_model(), tolerance=goal, running=1)
    asked = [Submit(f"f{s}", PROMPT, 30, Sampling(temperature, seed=s, acceptance="tolerance")) for s in range(30)]
    assert read_tolerance(loop, asked[0]) == 1.5
    wide = rate_of(loop, asked[1:])[0]
    narrow = dear_loop(draft_model(), tolerance=replace(goal, fixed_delta=0.01), running=1)
    assert wide > rate_of(narrow, asked)[0]
    for _ in range(3):
        decode(loop, asked)
    assert loop.gauges(0).tolerance_deltas == {"greedy": 1.5, "sampled": 1.5}
    assert loop.gauges(0).tolerance_recalibrations == 0


def read_tolerance(loop: DecodeLoop, submit: Submit) -> float:
    """The tolerance that a request's last stats tell of."""
    _, rounds = decode(loop, [submit])
    stats = rounds[-1].deltas[-1].stats
    assert stats is not None
    return stats.tolerance_delta


def test_requests_that_did_not_ask_for_it_are_not_judged_tolerantly():
    """Side by side with tolerant ones, whose tolerance is known."""
    loop = dear_loop(draft_model(), tolerance=ToleranceGoal(0.99, 16, 5.0))
    decode(loop, submits("tolerance", 50))
    assert loop.gauges(0).tolerance_deltas
    exact = [Submit(f"x{seed}", PROMPT, 40, Sampling(float(seed % 2), seed=seed)) for seed in range(12)]
    alone = decode(loop_over(toy(), None), exact)[0]
    mixed, rounds = decode(loop, [one for pair in zip(exact, submits("tolerance", 12), strict=True) for one in pair])
    assert {key: mixed[key] for key in alone} == alone
    assert {"coupled", "greedy", "tolerance"} <= {rule for done in rounds for rule in done.by_rule}


@pytest.mark.parametrize("rule", ["rejection", "tolerance"])
def test_a_seed_gives_the_same_tokens_with_the_same_drafts(rule):
    asked = submits(rule, 12, max_tokens=40, depth=4, top_k=0)
    first, second = (decode(loop_over(toy(), draft_model(), running=1), asked)[0] for _ in range(2))
    assert first == second
    other = decode(loop_over(toy(), draft_model(2.0), running=1), asked)[0]
    assert other != first


def test_without_drafts_the_tokens_are_those_of_plain_sampling():
    plain = decode(loop_over(toy(), None), submits("coupled", 20, max_tokens=30))[0]
    assert decode(loop_over(toy(), None), submits("rejection", 20, max_tokens=30))[0] == plain
    assert decode(loop_over(toy(), draft_model()), submits("rejection", 20, max_tokens=30, depth=0))[0] == plain


def test_greedy_requests_stay_greedy():
    plain = decode(loop_over(toy(), None), submits("coupled", 6, max_tokens=30, temperature=0.0))[0]
    asked = submits("rejection", 6, max_tokens=30, temperature=0.0)
    out, rounds = decode(loop_over(toy(), draft_model(0.2)), asked)
    assert out == plain
    assert sum(done.accepted for done in rounds) > 0


@pytest.mark.parametrize("rule", ["rejection", "tolerance"])
def test_a_drafter_that_breaks_its_word_stops_nobody(rule):
    class Broken(FailedDrafter):
        def propose(self, asks):
            shares = np.array([np.nan, 1.0], np.float32)
            proposal = DraftDistribution(np.array([101, 32], np.uint32), shares)
            return [Draft((101, 32), (0.9, 0.9), "broken", proposals=(proposal, None)) for _ in asks]

    out, rounds = decode(loop_over(toy(), Broken(STATE)), submits(rule, 10, max_tokens=20))
    assert all(len(tokens) == 20 for tokens in out.values())
    assert sum(done.drafted for done in rounds) > 0
    assert sum(done.accepted for done in rounds) == 0


def test_a_grammar_bends_the_distribution_and_no_draft_leans_it():
    """Of three tokens that may follow, the drafter often draws a fourth: it is rejected, not dropped."""
    tokenizer = Tokenizer.bytes_only()
    model = toy()
    asked = [
        Submit(
            f"{seed}",
            PROMPT,
            LENGTH,
            Sampling(1.0, seed=seed, acceptance="rejection"),
            grammar=Grammar("regex", f"[ eat]{{{LENGTH}}}"),
            depth=2,
        )
        for seed in range(SEEDS)
    ]
    allowed = [ord(letter) for letter in " eat"]
    out, rounds = decode(loop_over(model, draft_model(2.0), grammars=grammars_over(tokenizer, model)), asked)
    assert sum(done.accepted for done in rounds) > 0
    assert {len(tokens) for tokens in out.values()} == {LENGTH}
    counts = Counter(tuple(tokens) for tokens in out.values())
    assert unlike(counts, chances_within(allowed)) > 1e-3


def chances_within(allowed: Sequence[int]) -> dict[tuple[int, ...], float]:
    """The target's probability of every output of allowed tokens."""
    model, found = toy(), {}
    mask = np.full(272, -np.inf, np.float32)
    mask[list(allowed)] = 0.0
    for output in itertools.product(allowed, repeat=LENGTH):
        chance = 1.0
        row = model.forward([Segment(0, 0, PROMPT, (len(PROMPT) - 1, len(PROMPT)), apart=False)]).logits[0]
        for index, token in enumerate(output):
            ids, shares = distribution(row + mask, Sampling(1.0), 0)
            chance *= float(shares[ids == token].sum())
            row = model.forward([Segment(0, len(PROMPT) + index, [token], (0, 1), apart=True)]).logits[0]
        found[output] = chance
    return found


def test_drawn_drafts_never_cost_a_sequence_its_place():
    """In a cache so tight that there are no blocks for drafts most of the time."""
    model = toy(kv_blocks=6)
    asked = submits("rejection", 8, max_tokens=60, depth=8)
    out, _ = decode(loop_over(model, draft_model()), asked)
    assert all(len(tokens) == 60 for tokens in out.values())
    assert model.free_blocks() == model.capabilities.total_blocks
