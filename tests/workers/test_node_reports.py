"""Which hosts fit together, and what a card of another version says."""

from __future__ import annotations

import json

import pytest

from orchestrator.launch.node_reports import describe_skew, write_card


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, ""),
        ({"outrider": "9.9.9"}, "and the front 9.9.9: install the same on both"),
        ({"python": "3.99.1"}, "and the front 3.99.1: Ray needs the same minor version"),
        ({"ray": "9.0.0"}, "this host has Ray 2.60.0, and the front 9.0.0"),
        ({"outrider": None}, "the front is of another version of Outrider"),
    ],
)
def test_a_host_of_other_versions_is_told_which(changed: dict[str, str | None], why: str) -> None:
    card = json.loads(write_card("2.60.0")) | changed
    skew = describe_skew(json.dumps(card).encode(), "2.60.0")
    assert why in skew
    assert bool(why) == bool(skew)


def test_patches_of_python_go_together() -> None:
    card = json.loads(write_card("2.60.0"))
    card["python"] = ".".join([*card["python"].split(".")[:2], "99"])
    assert describe_skew(json.dumps(card).encode(), "2.60.0") == ""
