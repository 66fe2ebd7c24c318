"""Whatever is committed, rejected, begun anew or squeezed out: the draft's KV cache is that of a fresh computation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.contract import Segment
from adapters.simulated.model import ToyModel
from orchestrator.clock import SystemClock
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.cache import DraftSequence
from orchestrator.worker.drafting.model import ModelDrafter
from orchestrator.worker.drafting.port import Ask
from policies.sampling import Sampling
from tests.support.loops import toy

KEYS = ("a", "b", "c", "d")
SYSTEM = [60, 32, 101] * 12  # some prompts begin alike

prompts = st.builds(
    lambda shared, own: SYSTEM[:shared] + own, st.sampled_from([0, 20, 36]), st.lists(st.integers(1, 9), min_size=1)
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sampled_from(KEYS), prompts),
        st.tuples(st.just("again"), st.sampled_from(KEYS), st.integers(0, 60)),
        st.tuples(st.just("round"), st.sets(st.sampled_from(KEYS), min_size=1), st.integers(0, 7)),
        st.tuples(st.just("end"), st.sampled_from(KEYS), st.just(0)),
    ),
    max_size=25,
)


def read_cache(model: ToyModel, slot: int, count: int) -> np.ndarray:
    """What the cache holds of a slot's first positions: (hash of all before, token)."""
    size = model.capabilities.block_tokens
    table = model._pool.table(slot, count) if count else []
    return np.array([model._cache[table[at // size], at % size] for at in range(count)]).reshape(-1, 2)


def fresh(known: DraftSequence) -> np.ndarray:
    """The same, computed at once: what it reads of the prompt, and behind it rows of their own class where they are."""
    model, begin = toy(rows=4096), known.skipped
    split = max(known.prompt if known.apart else known.held, begin)
    for start, end in ((begin, min(split, known.held)), (split, known.held)):
        if start < end:
            apart = known.apart and start >= known.prompt
            model.forward([Segment(0, start - begin, known.tokens[start:end], (0, 0), apart=apart)])
    return read_cache(model, 0, known.held - begin)


class WindowedDrafter(ModelDrafter):
    """A draft model that reads no more than so many tokens of a text."""

    window = sys.maxsize

    def _choose_windows(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            if ask.key in self._known:
                self._known[ask.key].window = self.window


@given(
    steps,
    st.sampled_from([4, 12, 400]),
    st.sampled_from([1, 2, 8]),
    st.integers(0, 3),
    st.sampled_from([3, 17, sys.maxsize]),
)
@settings(max_examples=120)
def test_the_cache_is_always_that_of_a_fresh_computation(steps, blocks, slots, agreed, window):
    model = toy(kv_blocks=blocks, slots=slots, rows=24)
    drafter = WindowedDrafter(model, DrafterState("m", "model"), SystemClock(), vocabulary=272, prefill_ms=1.0)
    drafter.window = window
    held: dict[str, list[int]] = {}
    for number, (kind, what, more) in enumerate(steps):
        if kind == "begin":
            held[what] = list(more)
            drafter.begin(what, more, Sampling(temperature=number % 2, seed=number))
        elif kind == "again" and what in held:
            held[what] = [*held[what][:more], 3]
            drafter.begin(what, held[what], Sampling())
        elif kind == "end":
            held.pop(what, None)
            drafter.end(what, keep=True)
        elif kind == "round":
            asks = [Ask(key, more) for key in sorted(what)]
            for ask, draft in zip(asks, drafter.propose(asks), strict=True):
                assert len(draft.tokens) <= more
                if ask.key in held:  # the target accepts some of it, and says one more itself
                    verdict = [*draft.tokens[: (number + agreed) % 8], 5 + number % 3]
                    held[ask.key] += verdict
                    drafter.extend(ask.key, verdict)
        for key, known in drafter._known.items():
            assert known.tokens == held[key]
            assert known.held <= len(known.tokens)
            if known.slot >= 0:
                assert np.array_equal(read_cache(model, known.slot, known.held - known.skipped), fresh(known))
    for key in KEYS:
        drafter.end(key, keep=False)
    assert drafter.states()[0].state == "ok"
    assert model.free_blocks() == model.capabilities.total_blocks


@given(steps)
@settings(max_examples=40)
def test_what_is_drafted_depends_on_the_tokens_alone(steps):
    """A drafter with a history says what a new one says: greedy, so that its tokens are the model's own."""
    drafter = ModelDrafter(toy(), DrafterState("m", "model"), SystemClock(), vocabulary=272, prefill_ms=1e6)
    held: dict[str, list[int]] = {}
    first: dict[str, int] = {}
    for number, (kind, what, more) in enumerate(steps):
        if kind == "begin":
            held[what], first[what] = list(more), len(more)
            drafter.begin(what, more, Sampling())
        elif kind == "round":
            keys = sorted(key for key in what if key in held)
            found = drafter.propose([Ask(key, more) for key in keys])
            for key, draft in zip(keys, found, strict=True):
                new = ModelDrafter(toy(), DrafterState("n", "model"), SystemClock(), vocabulary=272, prefill_ms=1e6)
                new.begin("x", held[key][: first[key]], Sampling())
                new.extend("x", held[key][first[key] :])
                assert new.propose([Ask("x", more)])[0].tokens == draft.tokens
                verdict = [*draft.tokens[: number % 5], 5]
                held[key] += verdict
                drafter.extend(key, verdict)


def test_of_a_long_text_the_end_is_read(monkeypatch):
    model = toy(rows=4096)
    drafter = ModelDrafter(model, DrafterState("m", "model"), SystemClock(), vocabulary=272, prefill_ms=1e6)
    drafter.measure()
    forward, rows = model.forward, []

    def count_rows(segments: list[Segment]):
        rows.append([(segment.start, len(segment.tokens)) for segment in segments])
        return forward(segments)

    monkeypatch.setattr(model, "forward", count_rows)
    text = [1 + at % 200 for at in range(1000)]
    ask = Ask("x", 1, round_ms=1e6, fixed=False)
    drafter.begin("x", text, Sampling())
    (draft,) = drafter.propose([ask])
    assert len(draft.tokens) == 1
    (((start, read),),) = rows
    assert (start, 64 <= read < 200) == (0, True)
    drafter.extend("x", [9, 9])
    drafter.propose([ask])
    assert rows[-1] == [(read, 2)], "it goes on behind what it read"
    drafter.begin("y", text, Sampling())
    drafter.propose([replace(ask, key="y", fixed=True)])
    assert rows[-1] == [(0, 1000)], "at a fixed depth all of it"
