"""A file of weights that was left in the middle is gone on with, and ends as an undisturbed one does."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.decoder.spec import Dense, Grouped, Tensor
from adapters.decoder.weight_file import Array, Matrices, WeightFile
from adapters.source_meter import SourceMeter

SIZES = (5, 64, 0, 700, 1, 130)


class Ended(BaseException):
    """Whoever wrote was ended."""


def describe(number: int, made: list[int]) -> Iterator[Array]:
    """Yield the arrays of a part, in pieces, and note that it was made."""
    made.append(number)
    rng = np.random.default_rng(number)
    for name, size in (("values", SIZES[number]), ("scales", 3)):
        values = rng.integers(0, 255, size, np.uint8)
        yield Array(f"{number}.{name}", "u8", (size,), [values[: size // 2], values[size // 2 :]])


def write(path: Path, source: Path, *, until: int = len(SIZES), align_bytes: int = 64) -> list[int]:
    """Write the parts before `until`, and be ended within that one; returns those that were made."""
    made: list[int] = []
    meter = SourceMeter(source, lambda done, total: None)
    try:
        with WeightFile(path, meter, align_bytes=align_bytes, head_bytes=align_bytes) as file:
            for number in range(len(SIZES)):
                file.keep(str(number), partial(describe_until, number, until, made))
            file.write_head(b"h" * align_bytes)
            file.append(memoryview(b"behind them"))
    except Ended:
        pass
    return made


def describe_until(number: int, until: int, made: list[int]) -> Iterator[Array]:
    for array in describe(number, made):
        yield array
        if number == until:
            raise Ended


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "model"
    path.write_bytes(bytes(1000))
    return path


@settings(max_examples=60, deadline=None)
@given(ends=st.lists(st.integers(0, len(SIZES) - 1), max_size=4), align_bytes=st.sampled_from([1, 64, 4096]))
def test_wherever_it_is_ended_the_file_is_the_same_and_no_finished_part_is_made_again(
    tmp_path_factory: pytest.TempPathFactory, source: Path, ends: list[int], align_bytes: int
) -> None:
    directory = tmp_path_factory.mktemp("made")
    whole, left = directory / "whole.bin", directory / "left.bin"
    assert write(whole, source, align_bytes=align_bytes) == list(range(len(SIZES)))
    finished = 0
    for until in [*sorted(ends), len(SIZES)]:
        made = write(left, source, until=until, align_bytes=align_bytes)
        assert made == list(range(len(SIZES)))[finished : until + 1]
        finished = until
    assert left.read_bytes() == whole.read_bytes()
    assert left.with_suffix(".kept").read_text() == whole.with_suffix(".kept").read_text()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = ("key", "blocks", "read_bytes", "digest")


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_a_damaged_or_foreign_note_or_file_is_not_believed(
    tmp_path_factory: pytest.TempPathFactory, source: Path, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("harmed")
    whole, left = directory / "whole.bin", directory / "left.bin"
    write(whole, source)
    write(left, source, until=4)
    journal = left.with_suffix(".kept")
    lines = journal.read_text().splitlines()
    harm = data.draw(st.sampled_from(["byte", "short", "bytes of a note", "line", "field", "block", "source"]))
    at = data.draw(st.integers(1, len(lines) - 1))
    if harm == "byte":
        content = bytearray(left.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        left.write_bytes(content)
    elif harm == "short":
        os.truncate(left, data.draw(st.integers(0, left.stat().st_size)))
    elif harm == "bytes of a note":
        journal.write_bytes(data.draw(st.binary(max_size=40)))
    elif harm == "source":
        journal.write_text("\n".join(["[[1, 2, 3]]", *lines[1:]]) + "\n")
    else:
        part = json.loads(lines[at])
        if harm == "line":
            part = data.draw(_JSON)
        elif harm == "field":
            part[data.draw(st.sampled_from(_FIELDS))] = data.draw(_JSON)
        else:
            part["blocks"][0][data.draw(st.sampled_from(["offset", "size"]))] = data.draw(st.integers())
        lines[at] = json.dumps(part)
        journal.write_text("\n".join(lines) + "\n")
    write(left, source)
    assert left.read_bytes() == whole.read_bytes()
    assert journal.read_text() == whole.with_suffix(".kept").read_text()


def test_a_source_that_was_touched_is_read_again(tmp_path: Path) -> None:
    path, source = tmp_path / "weights.bin", tmp_path / "source"
    source.write_bytes(bytes(1000))
    write(path, source, until=4)
    source.write_bytes(bytes(1001))
    assert write(path, source) == list(range(len(SIZES)))


@pytest.mark.parametrize("alike", [True, False])
def test_matrices_that_are_stacked_or_not_are_read_once(tmp_path: Path, source: Path, *, alike: bool) -> None:
    full = Dense(np.ones((2, 32), np.float32))
    other = Grouped(np.ones((2, 32), np.uint8), np.ones((2, 1), np.float16), np.zeros((2, 1), np.uint8), 8, 32)
    tensors: dict[str, Tensor] = {"a": full, "b": full if alike else other, "c": full}
    read: list[str] = []

    def keep(names: str) -> list[str]:
        def read_tensor(name: str) -> Tensor:
            read.append(name)
            if name not in names:
                raise Ended
            return tensors[name]

        def describe_all(key: str, parts: object) -> list[Array]:
            if key not in ("joined", *names):
                raise Ended
            return [Array(key, "f32", (2, 32), [full.values])]

        with WeightFile(tmp_path / "m.bin", SourceMeter(source, lambda done, total: None)) as file:
            stack = Matrices(file, read_tensor, lambda matrices: len(set(map(type, matrices))) == 1, describe_all)
            return [part.key for part in stack.keep("joined", ["a", "b", "c"])]

    assert keep("abc") == (["joined"] if alike else ["a", "b", "c"])
    assert keep("") == (["joined"] if alike else ["a", "b", "c"])
    assert read == ["a", "b", "c"]
    if not alike:  # the last of them was not written when it was ended
        journal = tmp_path / "m.kept"
        journal.write_text("".join(f"{line}\n" for line in journal.read_text().splitlines()[:-1]))
        assert keep("c") == ["a", "b", "c"]
        assert read == ["a", "b", "c", "c"]
