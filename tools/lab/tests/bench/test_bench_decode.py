"""`outrider bench decode` and `pairs` as a person runs them, over the simulated model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def toy(tmp_path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(
        # Drafts pay where a forward takes longer than what a busy machine adds to it.
        f"model: {{source: 'simulated:toy?base_ms=5', adapter: simulated}}\nstore: {{directory: '{tmp_path}/store'}}\n"
    )
    return path


def test_bench_decode_compares_token_for_token_and_names_its_figures(tmp_path, toy, outrider):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    prompts.write_text(
        "".join(json.dumps({"category": f"c{i % 2}", "turns": [f"prompt {i}"]}) + "\n" for i in range(6))
    )
    done = outrider(
        *("bench", "decode", "--config", str(toy), "--prompts", str(prompts), "--max-tokens", "40"),
        *("--limit", "5", "--concurrency", "2", "--seed", "3", "--temperature", "0.8", "--json", str(out)),
    )
    assert done.returncode == 0, done.stderr
    assert "identical output: yes" in done.stdout
    result = json.loads(out.read_text())
    assert set(result) == {"summary", "runs", "environment", "formulas"}
    summary = result["summary"]
    for name in (
        *("identical", "mismatches", "prompts", "plain_tok_s", "spec_tok_s", "plain_tpot_ms", "spec_tpot_ms"),
        *("acceptance_rate", "mean_acceptance_length", "overhead_share", "worst_category_vs_plain"),
    ):
        assert name in summary
    assert summary["identical"] is True
    assert summary["mismatches"] == 0
    assert summary["prompts"] == 5
    assert set(summary["categories"]) == {"c0", "c1"}
    speeds = {category["plain_tpot_ms"] / category["spec_tpot_ms"] for category in summary["categories"].values()}
    assert summary["worst_category_vs_plain"] == pytest.approx(min(speeds))
    assert summary["worst_category_vs_plain"] <= summary["tpot_speed_up"] <= max(speeds)
    plain, spec = result["runs"]
    assert sum(request["drafted"] for request in plain["requests"]) == 0
    assert sum(request["accepted"] for request in spec["requests"]) > 0
    assert [r["generated"] for r in plain["requests"]] == [r["generated"] for r in spec["requests"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json\n", "p.jsonl:1"),
        ('{"prompt": "a"}\n{"text": "b"}\n', "p.jsonl:2"),
        (None, "cannot be read"),
    ],
)
def test_bench_decode_names_what_is_wrong_with_the_prompts(tmp_path, toy, content, message, outrider):
    prompts = tmp_path / "p.jsonl"
    if content is not None:
        prompts.write_text(content)
    done = outrider("bench", "decode", "--config", str(toy), "--prompts", str(prompts))
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_bench_pairs_runs_every_pairing_and_tells_what_failed(tmp_path, toy, outrider):
    out = tmp_path / "out.json"
    # At a fixed depth: a draft that costs what the target costs is not asked otherwise.
    arguments = ("bench", "pairs", "--config", str(toy), "--max-tokens", "30", "--depth", "8", "--json", str(out))
    done = outrider(*arguments)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert [row["pair"] for row in result["runs"]] == [
        "suffix -> simulated",
        "simulated -> simulated",
        "suffix + simulated -> simulated",
    ]
    summary = result["summary"]
    assert (summary["pairs"], summary["identical_pairs"], summary["failed_pairs"]) == (3, 3, 0)
    assert summary["coupled_acceptance"] > 0.9
    assert summary["rejection_acceptance"] > 0.9
    same = result["runs"][1]
    assert same["greedy"]["mean_acceptance_length"] > 3.0
    assert same["kv_cache_mib"] > 0
    assert same["greedy"]["control_ratio"] > 0.0
    assert same["greedy"]["draft_rounds"] > 0
    assert same["greedy"]["draft_ms"] > 0.0
    assert result["runs"][0]["greedy"]["draft_rounds"] == 0  # no draft model
    toy.write_text(
        toy.read_text()
        + "drafts: [{method: model, adapter: simulated, source: 'simulated:toy?fault=device_lost&at=9'}]\n"
    )
    for wrong, message in (("(", "no regular expression"), ("nothing", "suffix -> simulated")):
        done = outrider(*arguments, "--only", wrong)
        assert done.returncode == 1
        assert message in done.stderr
    done = outrider(*arguments, "--only", "fault")
    assert done.returncode == 1
    assert "pairs failed" in done.stderr
    result = json.loads(out.read_text())
    assert result["summary"]["failed_pairs"] == len(result["runs"]) == 2
    assert all(row["identical"] and "the device was lost" in row["failed"] for row in result["runs"])
