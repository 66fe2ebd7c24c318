"""`outrider bench wan`, as a person runs it, over simulated devices."""

from __future__ import annotations

import json

import pytest
from outrider_lab.bench.wan.run import summarise_wan


def test_it_compares_the_ways_over_a_slow_link(outrider, tmp_path) -> None:
    out = tmp_path / "out.json"
    arguments = ("--no-real", "--rtt", 12, "--max-tokens", 12, "--limit", 2, "--json", out)
    code, shown, errors = outrider("bench", "wan", *arguments)
    assert code == 0, errors
    result = json.loads(out.read_text())
    summary, (row,) = result["summary"], result["rows"]
    assert summary["rtt_ms"] == 12.0
    assert summary["identical"] is True
    assert summary.keys() >= {"vs_plain_from_edge", "vs_sequential", "bytes_per_token"}
    assert row["tokens"] == 2 * 12
    assert row["measured_rtt_ms"] >= 12.0
    assert row["first_token_ms"] >= 12.0 + 24.0
    assert row["bytes_per_token"] > 0.0
    assert "reverse" in shown


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (("--no-real", "--json", "/nowhere/out.json"), "no such directory"),
        (("--draft", "/nowhere/model.gguf"), "--draft /nowhere/model.gguf"),
    ],
)
def test_what_cannot_be_measured_is_named(outrider, wrong, named) -> None:
    code, _, errors = outrider("bench", "wan", *wrong)
    assert code != 0
    assert named in errors


def test_the_summary_is_of_the_worst_pair_at_its_round_trip() -> None:
    def row(rtt_ms: float, plain: float, carried: float) -> dict[str, object]:
        figures: dict[str, object] = {"vs_plain_from_edge": plain, "vs_sequential": plain, "reverse_vs_plain": plain}
        return {"rtt_ms": rtt_ms, "bytes_per_token": carried, "identical": True} | figures

    found = summarise_wan([row(0.0, 3.0, 900.0), row(12.0, 2.0, 300.0), row(12.0, 1.6, 200.0), row(40.0, 1.1, 100.0)])
    assert found["rtt_ms"] == 12.0
    assert found["vs_plain_from_edge"] == 1.6
    assert found["bytes_per_token"] == 300.0
    assert found["worst_vs_plain"] == 1.1
