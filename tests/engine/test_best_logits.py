"""Where a device gives the best logits of a row alone, every request gets the tokens that whole rows give it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.contract import ForwardResult, Segment
from orchestrator.protocol.commands import Submit
from orchestrator.worker.engine.loop import DecodeLoop
from policies.sampling import Sampling
from tests.engine.test_loop import WildDrafter
from tests.engine.test_rules import GRAMMAR, TOKENIZER
from tests.support.best_logits import BestModel
from tests.support.branches import TurningDrafter, branching_loop, count_branches
from tests.support.drafters import texts_of
from tests.support.fixed_depth import FixedDepth
from tests.support.loops import END, alone, decode, grammars_over, loop_over, suffix, toy

GREEDY, TOP = Sampling(), Sampling(0.9, top_k=5, seed=3)
SAMPLINGS = {
    "greedy": GREEDY,
    "of rejection": Sampling(0.0, acceptance="rejection"),
    "top-k": TOP,
    "top-k, warm": replace(TOP, temperature=1.7),
    "top-k and top-p": replace(TOP, top_p=0.6),
    "top-k and min-p": replace(TOP, min_p=0.2),
    "top-k, typical": replace(TOP, typical_p=0.5),
    "top-k, top excluded": replace(TOP, xtc_probability=0.5, xtc_threshold=0.05),
    "top-1": replace(TOP, top_k=1),
    "top-p": Sampling(0.8, top_p=0.9, seed=5),
    "top-p, low": Sampling(0.8, top_p=0.3, seed=5),
    "min-p": Sampling(0.9, min_p=0.1, seed=6),
}
WHOLE: dict[str, dict[str, Any]] = {
    "whole: more than the device gives": {"sampling": replace(TOP, top_k=9)},
    "whole: all tokens": {"sampling": Sampling(1.0, seed=4)},
    "whole: top-p and min-p": {"sampling": Sampling(0.8, top_p=0.9, min_p=0.1, seed=5)},
    "whole: typical": {"sampling": Sampling(0.8, top_p=0.9, typical_p=0.5, seed=5)},
    "whole: rejection": {"sampling": replace(TOP, acceptance="rejection")},
    "whole: tolerance": {"sampling": Sampling(0.0, acceptance="tolerance")},
    "whole: scores": {"logprobs": 2},
    "whole: the prompt's scores": {"logprobs": 1, "prompt_logprobs": True},
    "whole: bias": {"sampling": Sampling(logit_bias=((101, 2.0),))},
    "whole: a penalty": {"sampling": Sampling(repetition_penalty=1.3)},
    "whole: least tokens": {"min_tokens": 5},
    "whole: a grammar": {"grammar": GRAMMAR},
}


def submit(name: str, **fields: Any) -> Submit:
    own: dict[str, Any] = {"prompt": [60 + len(name), 32, 101] * 9, "max_tokens": 40, "stop_tokens": [END]}
    return Submit(name, **own | {"sampling": GREEDY} | fields)


BEST = [submit(name, sampling=sampling) for name, sampling in SAMPLINGS.items()]
ALL = BEST + [submit(name, **fields) for name, fields in WHOLE.items()]


def loop(model: Any, depth: int) -> DecodeLoop:
    policy = FixedDepth(depth)
    return loop_over(model, suffix(), running=6, depth=depth, policy=policy, grammars=grammars_over(TOKENIZER, model))


def list_answers(own: DecodeLoop, submits: list[Submit]) -> list[Any]:
    """What each round gave each request, with scores."""
    deltas = [delta for done in decode(own, submits)[1] for delta in done.deltas]
    return [(delta.request_id, delta.tokens, delta.finish, delta.logprobs, delta.prompt_logprobs) for delta in deltas]


@pytest.mark.parametrize("depth", [0, 3])
def test_tokens_and_scores_are_those_of_whole_rows(depth):
    model = BestModel(toy())
    assert list_answers(loop(model, depth), ALL) == list_answers(loop(toy(), depth), ALL)
    assert all(model.crossed)


@pytest.mark.parametrize("own", BEST, ids=lambda own: own.request_id)
def test_of_a_request_that_they_decide_no_row_crosses_whole(own):
    model = BestModel(toy())
    tokens = decode(loop(model, 3), [own])[0]
    assert tokens == alone([own])
    assert model.crossed[0] == 0
    assert model.crossed[1] > 0
    if own.sampling.top_k or own.sampling.rule == "greedy":
        assert model.reads == 0


def test_where_a_nucleus_is_wider_than_what_is_known_the_row_is_read_behind_it_and_later_ones_come_whole():
    wide = submit("wide", sampling=Sampling(2.5, top_p=0.99, seed=7))
    model = BestModel(toy(), most=3)
    assert decode(loop(model, 3), [wide])[0] == alone([wide])
    assert 5 <= model.reads < 20
    assert model.crossed[0] > 10


@pytest.mark.parametrize("own", ALL[len(BEST) :], ids=lambda own: own.request_id)
def test_of_others_all_rows_cross_whole(own):
    model = BestModel(toy())
    decode(loop(model, 0), [own])
    assert model.crossed[0] > 0
    assert model.crossed[1] == 0


@given(st.lists(st.lists(st.integers(0, 271), max_size=6), max_size=8), st.integers(1, 6), st.integers(14, 80))
@settings(max_examples=25)
def test_wild_drafts_and_preemption_change_nothing(guesses, running, blocks):
    submits = [submit for submit in ALL if submit.sampling.rule in ("greedy", "coupled")]
    texts = []
    for model in (toy(kv_blocks=blocks, rows=64), BestModel(toy(kv_blocks=blocks, rows=64))):
        own = loop_over(model, WildDrafter(guesses), running=running, grammars=grammars_over(TOKENIZER, model))
        texts.append(decode(own, submits)[0])
    assert texts[0] == texts[1]


def test_branches_are_judged_by_them():
    submits = [replace_id(own, number) for number, own in enumerate([*BEST[:1], *BEST[2:5], ALL[-6]] * 2)]
    expected = alone(submits)
    model = BestModel(toy())
    drafter = TurningDrafter(texts_of(submits, expected), wrong_every=2)
    out, rounds = decode(branching_loop(model, drafter, running=4), submits)
    assert out == expected
    assert count_branches(rounds)[1] > 0
    assert all(model.crossed)


def replace_id(own: Submit, number: int) -> Submit:
    return submit(f"r{number}", prompt=own.prompt[: 3 + 3 * number], sampling=own.sampling, logprobs=own.logprobs)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sampling", [GREEDY, TOP], ids=["greedy", "top-k"])
def test_garbage_is_found_in_them(garbage, sampling):
    bad, good = submit("bad", sampling=sampling), submit("good", sampling=sampling, prompt=[5] * 20)
    model: Any = toy()
    sound = model.forward

    def spoil(batch: list[Segment]) -> ForwardResult:
        result, at = sound(batch), 0
        for segment in batch:
            end = at + segment.rows[1] - segment.rows[0]
            if list(segment.tokens[:2]) == bad.prompt[:2]:
                result.logits[at:end] = garbage
            at = end
        return result

    model.forward = spoil
    own = loop(BestModel(model), 0)
    assert decode(own, [bad, good])[0] == alone([good]) | {"bad": []}
    assert [failed.kind for failed in own.failures()] == ["not_finite"]
