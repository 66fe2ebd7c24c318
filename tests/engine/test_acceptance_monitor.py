"""Warnings of low acceptance, from loops that decode with drafters good and bad."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import AcceptanceWarning
from orchestrator.worker.drafting.port import Ask, Draft
from orchestrator.worker.engine.acceptance_monitor import AcceptanceMonitor
from policies.sampling import Sampling
from policies.serving.acceptance_alarm import Cause
from tests.support.drafters import KnowingDrafter, texts_of
from tests.support.loops import alone, decode, loop_over, requests, toy


class Random(KnowingDrafter):
    """One draft of sixteen is right; sure of everything."""

    name = "random"
    right_every = 16

    def __init__(self, texts: Any) -> None:
        super().__init__(texts)
        self._rng = random.Random(5)

    def _draft(self, ask: Ask) -> Draft:
        draft = super()._draft(ask)
        right = len(draft.tokens) * (self._rng.randrange(self.right_every) == 0)
        tokens = tuple(token if at < right else (token + 1) % 256 for at, token in enumerate(draft.tokens))
        return replace(draft, tokens=tokens, drafter=self.name)


class Shallow(KnowingDrafter):
    """Right in its first token, and only in that."""

    name = "shallow"

    def _draft(self, ask: Ask) -> Draft:
        draft = super()._draft(ask)
        tokens = tuple((token + min(at, 1)) % 256 for at, token in enumerate(draft.tokens))
        return replace(draft, tokens=tokens, drafter=self.name)


class Named(KnowingDrafter):
    def _draft(self, ask: Ask) -> Draft:
        return replace(super()._draft(ask), drafter=self.name)


@pytest.fixture(scope="module")
def submits() -> list[Submit]:
    return requests(6, depth=12, max_tokens=80, route="/v1/completions")


@pytest.fixture(scope="module")
def texts(submits: list[Submit]) -> list[list[int]]:
    return texts_of(submits, alone(submits))


@pytest.fixture(scope="module")
def submits_of_the_policy(submits: list[Submit]) -> list[Submit]:
    """The same requests where the policy chooses the depth."""
    return [msgspec.structs.replace(submit, depth=None) for submit in submits]


def warnings(drafter: KnowingDrafter, submits: list[Submit]) -> list[AcceptanceWarning]:
    loop = loop_over(toy(), drafter)
    decode(loop, submits)
    return loop.gauges(0).low_acceptance


def test_a_good_drafter_is_not_warned_of(submits, texts):
    assert warnings(Named(texts), submits) == []
    assert warnings(Named(texts, wrong_every=5), submits) == []


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (lambda texts: Named(texts, wrong_every=1), Cause.NOTHING_ACCEPTED),
        (Random, Cause.OVERCONFIDENT),
        (Shallow, Cause.TOO_DEEP),
    ],
    ids=["wrong", "random", "shallow"],
)
def test_a_bad_drafter_is_warned_of_with_the_likely_cause(submits, texts, bad, cause):
    drafter = bad(texts)
    (found,) = warnings(drafter, submits)
    assert_due(found, drafter.name, cause)


@pytest.mark.parametrize("bad", [lambda texts: Named(texts, wrong_every=1), Random], ids=["wrong", "random"])
def test_a_bad_drafter_is_warned_of_where_the_guard_leaves_it_alone(submits_of_the_policy, texts, bad):
    drafter = bad(texts)
    loop = loop_over(toy(), drafter)
    decode(loop, submits_of_the_policy)
    assert loop.gauges(0).drafters[0].drafted < 200  # that many were verified at most
    (found,) = loop.gauges(0).low_acceptance
    assert_due(found, drafter.name, found.cause)


def test_an_unsure_drafter_that_is_left_alone_is_no_fault():
    watch = AcceptanceMonitor(0.15)
    for index in range(2000):  # nothing is verified, and what it promises it keeps
        watch.add(_submit(), Draft((1, 2), (0.05, 0.05), "d"), 0, int(index % 20 == 0), 1 + int(index % 20 == 0))
    assert watch.standing() == []
    for index in range(2000):
        watch.add(_submit(), Draft((1, 2), (0.05, 0.05), "d"), 2, int(index % 20 == 0), 2)
    assert [one.cause for one in watch.standing()] == [Cause.HARD_TEXT]


def assert_due(found: AcceptanceWarning, drafter: str, cause: Cause) -> None:
    assert (found.drafter, found.route, found.user, found.cause) == (drafter, "/v1/completions", "", cause)
    assert found.rate <= found.upper < found.threshold == 0.15
    assert found.drafted >= 200


class Partial(Named):
    """Wrong in all that it drafts for one user's requests, whose ids say so."""

    def _draft(self, ask: Ask) -> Draft:
        draft = super()._draft(ask)
        return replace(draft, tokens=tuple((token + ask.key.startswith("ada")) % 256 for token in draft.tokens))


def test_where_other_users_fare_well_it_is_the_class(submits, texts):
    of_ada = [msgspec.structs.replace(one, request_id=f"ada-{one.request_id}", user="ada") for one in submits]
    (found,) = warnings(Partial(texts), [*submits, *of_ada])
    assert (found.user, found.rate, found.cause) == ("ada", 0.0, Cause.ONE_CLASS)


def _submit(temperature: float = 0.0, user: str = "") -> Submit:
    return Submit("x", [1], 5, Sampling(temperature), route="r", user=user)


def verify_all(watch: AcceptanceMonitor, submit: Submit, draft: Draft, accepted: int) -> None:
    """A draft all of whose tokens were verified."""
    watch.add(submit, draft, len(draft.tokens), accepted, accepted + 1)


def test_sampling_is_the_cause_where_greedy_requests_fare_well():
    watch = AcceptanceMonitor(0.15)
    draft = Draft((1, 2, 3, 4), (0.2, 0.2, 0.2, 0.2), "d")
    for _ in range(5):
        verify_all(watch, _submit(), draft, 2)
    for index in range(300):
        verify_all(watch, _submit(1.0), draft, int(index % 10 == 0))
    assert [one.cause for one in watch.standing()] == [Cause.SAMPLING]


def test_an_episode_ends_when_the_rate_is_back_and_the_next_one_is_another():
    watch = AcceptanceMonitor(0.15)
    draft = Draft((1, 2, 3, 4), (), "d")
    for _ in range(49):
        verify_all(watch, _submit(), draft, 0)
    assert watch.standing() == []  # 196 tokens are no evidence yet
    verify_all(watch, _submit(), draft, 0)
    assert [one.drafted for one in watch.standing()] == [200]
    seen = []
    for _ in range(40):
        verify_all(watch, _submit(), draft, 4)
        seen.append(bool(watch.standing()))
    assert seen[0]
    assert not seen[-1]
    assert seen == sorted(seen, reverse=True)  # it ends once
    for _ in range(1000):
        verify_all(watch, _submit(), draft, 0)
    assert len(watch.standing()) == 1


def test_what_is_old_counts_less_and_classes_are_bounded():
    watch = AcceptanceMonitor(0.15)
    draft = Draft((1, 2, 3, 4), (), "d")
    for _ in range(5000):
        verify_all(watch, _submit(), draft, 4)
    for _ in range(1500):
        verify_all(watch, _submit(), draft, 0)
    (found,) = watch.standing()
    assert found.drafted <= 2000
    for index in range(1000):
        verify_all(watch, _submit(user=str(index)), draft, 0)
    assert watch.standing() == []  # forgotten for newer classes, of none of which enough is known


def test_a_threshold_of_0_switches_it_off():
    watch = AcceptanceMonitor(0.0)
    for _ in range(1000):
        verify_all(watch, _submit(), Draft((1,), (), "d"), 0)
    assert watch.standing() == []


def test_what_a_grammar_adds_is_no_drafters():
    watch = AcceptanceMonitor(0.15)
    for _ in range(1000):
        verify_all(watch, _submit(), Draft((1, 2), (), "d", forced=2), 0)
    assert watch.standing() == []
