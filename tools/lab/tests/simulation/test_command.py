"""`outrider simulate`, as a person runs it."""

from __future__ import annotations

import json

import pytest

SKETCH = "docs/cluster-sketch.yaml"


def test_a_fleet_is_simulated_and_written(outrider, tmp_path):
    out = tmp_path / "out.json"
    made = "constant:rate=2,seconds=10,output_tokens=30,spread=0"
    code, shown, _ = outrider(
        "simulate", "--cluster", SKETCH, "--trace", made, "--plain", "--slo", "ttft=9000", "--json", out
    )
    assert code == 0
    assert "tokens a round" in shown
    summary = json.loads(out.read_text())["summary"]
    assert (summary["completed"], summary["output_tokens"], summary["slo_attainment"]) == (20, 600, 1.0)


def test_a_question_is_answered(outrider, tmp_path):
    out = tmp_path / "out.json"
    code, shown, _ = outrider("simulate", "--question", "mix", "--share", 0.1, "--json", out)
    assert code == 0
    assert "alike:" in shown
    rows = json.loads(out.read_text())["rows"]
    assert [(row["hall"], row["small"]) for row in rows] == [(4, 0), (3, 1), (2, 2), (1, 3), (0, 4)]
    assert [row["groups"] for row in rows] == [1, 2, 2, 2, 1]
    prices = [row["price_per_hour"] for row in rows]
    assert prices == sorted(prices, reverse=True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--cluster: a sketch of the fleet is needed"),
        (("--question", "weather"), "there is none of that name; there is mix"),
        (("--search",), "--search: say what is to be met"),
        (("--cluster", SKETCH, "--trace", "poisson:speed=1"), "'speed=1' is none of"),
        (("--cluster", SKETCH, "--trace", "none.jsonl"), "there is no such file"),
    ],
)
def test_what_cannot_be_simulated_is_told_in_one_line(outrider, arguments, said):
    code, _, errors = outrider("simulate", *arguments)
    assert code != 0
    assert said in " ".join(errors.split())
    assert "Traceback" not in errors
