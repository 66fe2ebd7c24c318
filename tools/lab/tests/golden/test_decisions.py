"""Replays decide what they decided when the file beside this one was written."""

import json

import pytest

from tools.lab.tests.golden.rounds import HERE, cases, play, recording


@pytest.fixture(scope="module")
def recorded():
    return recording()


@pytest.fixture(scope="module")
def kept():
    return json.loads((HERE / "decisions.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", list(cases()))
def test_every_round_is_decided_as_before(case, recorded, kept):
    lines = play(case, recorded)
    first = next((n for n, pair in enumerate(zip(lines, kept[case], strict=False)) if pair[0] != pair[1]), None)
    assert first is None, f"round {first}: {kept[case][first]!r} before, {lines[first]!r} now"
    assert len(lines) == len(kept[case])
