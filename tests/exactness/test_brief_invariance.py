"""The short check before a first answer sees each kind of forward that serving makes, and costs few rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from adapters.brief_invariance import find_brief_variance
from adapters.contract import ForwardResult, LoadOptions, NumericalClass, Segment, silent
from adapters.invariance import run_probe
from adapters.simulated.adapter import SimulatedAdapter
from device_profiles.profile import Exactness, Precision
from tests.support.wrapped_model import WrappedModel

Condition = Callable[["Faulty", Sequence[Segment], Segment], bool]


class Faulty(WrappedModel):
    """A sound model, but for other last bits of the segments for which a condition holds."""

    def __init__(self, model: Any, condition: Condition) -> None:
        super().__init__(model)
        self.condition = condition
        self.rows: list[int] = []
        self.written: dict[int, Segment] = {}
        """What wrote a position of slot 0 last."""

    def find_before(self, segment: Segment) -> Segment | None:
        """Return what wrote the position before a segment of slot 0."""
        return self.written.get(segment.start - 1) if segment.slot == 0 else None

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        self.rows.append(sum(len(segment.tokens) for segment in batch))
        if not self.capabilities.rewinds:
            assert all(one.start == self.count_cached_positions(one.slot) for one in batch)
        bad = [self.condition(self, batch, segment) for segment in batch]
        for segment in batch:
            if segment.slot == 0:
                ends = segment.start + len(segment.tokens)
                self.written.update(dict.fromkeys(range(segment.start, ends), segment))
        found = self._wrapped.forward(batch)
        logits, at = found.logits.copy(), 0
        for segment, is_bad in zip(batch, bad, strict=True):
            count = segment.rows[1] - segment.rows[0]
            logits[at : at + count] += 1e-3 * is_bad
            at += count
        return replace(found, logits=logits)


def load(tmp_path, *, slots: int = 4, kv_cache_bytes: int = 1 << 22) -> Any:
    adapter = SimulatedAdapter()
    (tmp_path / "source.txt").write_text("")
    adapter.prepare(tmp_path / "source.txt", tmp_path, silent)
    options = LoadOptions(
        device="SIM",
        exactness=Exactness.BIT,
        kv_cache_bytes=kv_cache_bytes,
        slots=slots,
        max_batch_rows=256,
        numerical_class=NumericalClass(Precision.FP32, Precision.FP32, fixed_width=16),
    )
    return adapter.load(tmp_path, options, silent)


def have_rows(count: int) -> Condition:
    return lambda _, __, one: len(one.tokens) == count


def follow(condition: Callable[[Segment], bool]) -> Condition:
    """Return what holds for a segment behind one for which a condition does."""
    return lambda model, _, one: (found := model.find_before(one)) is not None and condition(found)


FAULTS: dict[str, Condition] = {
    **{f"{rows} rows": have_rows(rows) for rows in (*range(1, 10), 17)},
    "small": lambda _, __, one: len(one.tokens) < 96,
    "one row is wanted of many": lambda _, __, one: len(one.tokens) > 1 and one.rows[1] - one.rows[0] == 1,
    "the first of two": lambda _, batch, one: len(batch) > 1 and one is batch[0],
    "the second of two": lambda _, batch, one: len(batch) > 1 and one is batch[1],
    "small and behind the border": lambda _, __, one: one.start >= 255 and len(one.tokens) < 6,
    "up to the border": lambda _, __, one: one.start + len(one.tokens) == 255,
    "across the border": lambda _, __, one: one.start < 256 < one.start + len(one.tokens),
    "a cache that grew": lambda model, _, one: model.count_cached_positions(one.slot) > 256 > one.start + 96,
    "behind what two rows wrote": follow(lambda before: len(before.tokens) == 2),
    "behind what nobody asked for": follow(lambda before: before.rows == (0, 0)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_kind_of_forward_is_compared(tmp_path, fault) -> None:
    model = Faulty(load(tmp_path), FAULTS[fault])
    probe = run_probe(model)
    assert find_brief_variance(model, probe) != "", fault
    assert [model.count_cached_positions(slot) for slot in range(4)] == [0] * 4


@pytest.mark.parametrize(("slots", "kv_cache_bytes"), [(4, 1 << 22), (1, 1 << 22), (4, 1 << 12), (1, 1 << 10)])
def test_a_sound_model_passes_and_pays_fewer_rows_than_two_probes(tmp_path, slots, kv_cache_bytes) -> None:
    model = Faulty(load(tmp_path, slots=slots, kv_cache_bytes=kv_cache_bytes), lambda *_: False)
    probe = run_probe(model)
    assert find_brief_variance(model, probe) == ""
    assert [model.count_cached_positions(slot) for slot in range(slots)] == [0] * slots
    assert sum(model.rows[1:]) < 100
    assert len(model.rows) < 25


def test_a_model_that_cannot_be_rolled_back_is_not(tmp_path) -> None:
    sound = load(tmp_path)
    sound.capabilities = replace(sound.capabilities, rewinds=False)
    model = Faulty(sound, lambda *_: False)
    assert find_brief_variance(model, run_probe(model)) == ""
    assert "8 rows" in find_brief_variance(Faulty(sound, have_rows(8)), run_probe(sound))


def test_a_model_with_kernels_for_single_rows_is_checked_as_a_whole(tmp_path) -> None:
    sound = load(tmp_path)
    sound.capabilities = replace(sound.capabilities, apart_tokens=4)
    model = Faulty(sound, lambda _, __, one: one.apart and len(one.tokens) == 3)
    assert "3 rows" in find_brief_variance(model, run_probe(model))
