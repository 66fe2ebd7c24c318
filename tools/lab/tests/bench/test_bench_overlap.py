"""`outrider bench overlap`, as a person runs it, over simulated devices."""

from __future__ import annotations

import json

import pytest
from outrider_lab.bench.overlap.run import summarise_overlap

SUMMARY = {"hidden_share", "hidden_share_simulated", "worst_vs_plain", "vs_sequential", "identical"}


def test_it_compares_three_ways_of_drafting(outrider, tmp_path):
    out = tmp_path / "out.json"
    code, shown, errors = outrider(
        "bench", "overlap", "--no-real", "--agree", 0.9, "--ratio", 8, "--max-tokens", 12, "--json", out
    )
    assert code == 0, errors
    result = json.loads(out.read_text())
    assert result["summary"].keys() >= SUMMARY
    assert result["summary"]["identical"]
    assert result["summary"]["hidden_share"] is None, "no real pair was measured"
    (row,) = result["rows"]
    assert row["tokens"] == 6 * 12
    assert row["pass_ms"] >= 3.0
    assert row["drafted"] > 0
    assert 0.0 < row["ready_share"] <= 1.0
    assert row["hidden_share"] == result["summary"]["hidden_share_simulated"]
    assert row["hidden_share"] > 0.0
    assert "overlapped" in shown
    assert "hidden_share = " in shown


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (("--no-real", "--json", "/nowhere/out.json"), "no such directory"),
        (("--draft", "/nowhere/model.gguf"), "--draft /nowhere/model.gguf"),
        (("--layers", 3), "has 30 layers"),
    ],
)
def test_what_cannot_be_measured_is_named(outrider, wrong, named):
    code, _, errors = outrider("bench", "overlap", *wrong)
    assert code != 0
    assert named in errors


def test_the_summary_is_of_the_worst_pair():
    def row(pair: str, **changes: object) -> dict[str, object]:
        figures = {"drafted": 10, "pass_ms": 2.0, "wait_ms": 5.0, "vs_plain": 2.0, "vs_sequential": 1.5}
        speeds = {"overlapped_tokens_per_s": 40.0, "plain_all_cores_tokens_per_s": 20.0, "identical": True}
        return {"pair": pair} | figures | speeds | changes

    found = summarise_overlap([row("simulated"), row("simulated", wait_ms=15.0, vs_plain=0.9), row("deepened")])
    assert found["hidden_share_simulated"] == pytest.approx(0.5)
    assert found["hidden_share"] == pytest.approx(0.75)
    assert found["worst_vs_plain"] == 0.9
    assert found["vs_plain_all_cores"] == 2.0
    assert found["identical"]
    assert not summarise_overlap([row("deepened"), row("deepened", identical=False)])["identical"]
