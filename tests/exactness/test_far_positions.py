"""The check of a class goes past the positions at which runtimes take other kernels, and computes a long text once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from adapters import registry
from adapters.contract import ForwardResult, LoadedModel, LoadOptions, Segment, silent
from adapters.invariance import find_variance

Changes = Callable[[Sequence[Segment], int], bool]
"""Whether a row at a position gets other bits in this batch."""


def is_alone(first: int) -> Changes:
    """Single rows, from a position on."""
    return lambda batch, position: len(batch[0].tokens) == 1 and position >= first


def is_beside(first: int) -> Changes:
    """Rows with others beside them, from a position on."""
    return lambda batch, position: len(batch) > 1 and position >= first


@pytest.fixture
def model(tmp_path: Path) -> Iterator[LoadedModel]:
    (tmp_path / "script.txt").write_text("")
    adapter = registry.get("simulated")
    (tmp_path / "prepared").mkdir()
    adapter.prepare(tmp_path / "script.txt", tmp_path / "prepared", silent)
    loaded = adapter.load(
        tmp_path / "prepared", LoadOptions("SIM", slots=6, max_batch_rows=264, kv_cache_bytes=8 << 20), silent
    )
    yield loaded
    loaded.close()


def change(model: LoadedModel, monkeypatch: pytest.MonkeyPatch, changes: Changes) -> list[int]:
    """Let a model give other bits, and return the numbers of rows that it is asked for from then on."""
    forward, rows = model.forward, []

    def forward_otherwise(batch: Sequence[Segment]) -> ForwardResult:
        rows.append(sum(len(one.tokens) for one in batch))
        found = forward(batch)
        at = 0
        for one in batch:
            for row in range(*one.rows):
                if changes(batch, one.start + row):
                    found.logits[at] += 2.0**-10
                at += 1
        return found

    monkeypatch.setattr(model, "forward", forward_otherwise)
    return rows


@pytest.mark.parametrize("first", [300, 511, 512, 1023, 1024])
@pytest.mark.parametrize(("kind", "said"), [(is_alone, "1 rows at a time"), (is_beside, "beside another sequence")])
def test_kernels_that_change_far_behind_the_beginning_are_found(model, monkeypatch, first, kind, said) -> None:
    change(model, monkeypatch, kind(first))
    assert said in find_variance(model)


def test_what_changes_nowhere_passes_and_a_long_text_is_computed_once(model, monkeypatch) -> None:
    rows = change(model, monkeypatch, lambda batch, position: False)
    assert find_variance(model) == ""
    assert sum(rows) < 4500  # 1,048 of them are the long text


@pytest.mark.parametrize("context", [300, 530, 600])
def test_a_short_context_is_checked_as_far_as_it_goes(model, monkeypatch, context: int) -> None:
    monkeypatch.setattr(model, "capabilities", replace(model.capabilities, max_context_tokens=context))
    change(model, monkeypatch, is_alone(512))
    assert (find_variance(model) != "") == (context > 512 + 20)
