"""`outrider drafts recommend`, as a person runs it: a real decode loop over simulated devices."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from orchestrator.config.drafts import ModelDraft, SuffixDraft
from orchestrator.config.model import ClusterConfig
from orchestrator.recommend.candidates import chain_candidates, choose_replica, list_candidates
from orchestrator.recommend.figures import (
    bootstrap_interval,
    choose_drafts,
    compare_chain,
    describe_categories,
)
from orchestrator.recommend.record import Prompt, Record
from orchestrator.recommend.table import describe_recommendation
from orchestrator.worker.measuring.prompts import MeasurementError

TARGET = "simulated:toy?base_ms=6&row_ms=0.2"
GOOD = "simulated:toy?base_ms=0.2&row_ms=0.02&agree=0.9"
DEAR = "simulated:toy?base_ms=40&agree=0.9"


def configure(path, **more):
    config = {
        "model": {"source": TARGET, "adapter": "simulated"},
        "store": {"directory": str(path.parent / "models")},
        **more,
    }
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    texts = [
        ("a", "Explain why the sea is salt."),
        ("a", "List four trees."),
        ("b", "Write a poem."),
        ("b", "Add 2 and 3."),
    ]
    path.write_text("".join(json.dumps({"category": one, "prompt": text}) + "\n" for one, text in texts))
    return path


def test_it_measures_each_draft_and_says_which_to_configure(tmp_path, outrider, prompts):
    config = configure(tmp_path / "c.yaml")
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "a.txt").write_text("The sea is salt because rivers carry it there.")
    store = tmp_path / "sea.drafts"
    assert outrider("drafts", "index", documents, "-o", store, "--config", config).returncode == 0
    options = ("--config", config, "--prompts", prompts, "--max-tokens", 24, "--json")
    done = outrider(
        "drafts", "recommend", *options, "--store", store, "--store", tmp_path / "none.drafts", "--model", GOOD
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    rows = {row["name"]: row for row in result["candidates"]}
    model = f"model {GOOD}"
    assert rows.keys() == {"none", "control", "suffix", "index sea", "index none", model, "chain"}
    assert "No such file" in rows["index none"]["failed"]
    assert not rows["index none"]["failed"].startswith("drafts["), "it is no place in the configuration"
    assert all(row["identical"] for row in rows.values() if not row["failed"])
    assert rows["none"]["drafted"] == rows["control"]["drafted"] == 0
    assert rows[model]["drafted"] > 0
    assert rows[model]["acceptance_rate"] > 0.5
    assert [row["category"] for row in result["categories"]] == ["a", "b"]
    summary = result["summary"]
    assert summary["identical"]
    assert summary["recommended"] in {"suffix", model, "chain"}, "a simulated draft at a thirtieth of the cost pays"
    assert summary["interval"][0] > 1.0
    assert summary["worst_router_share"] > 0.0
    ClusterConfig.model_validate(
        {"model": {"source": TARGET, "adapter": "simulated"}} | yaml.safe_load(summary["yaml"])
    )


def test_a_person_gets_the_text_to_paste(tmp_path, outrider, prompts):
    config = configure(tmp_path / "c.yaml", drafts=[{"method": "suffix", "max_match": 8}])
    done = outrider("drafts", "recommend", "--config", config, "--prompts", prompts, "--max-tokens", 16)
    assert done.returncode == 0, done.stderr
    assert "identical output: yes" in done.stdout
    pasted = done.stdout[done.stdout.index("\ndrafts:") :]
    assert yaml.safe_load(pasted)["drafts"] in ([], [{"method": "suffix", "max_match": 8}])


@pytest.mark.parametrize(
    ("more", "options", "named"),
    [
        ({"speculation": {"method": "off"}}, (), "speculation.method"),
        ({}, ("--prompts", "/nowhere.jsonl"), "/nowhere.jsonl: cannot be read"),
    ],
)
def test_what_cannot_be_compared_is_said_in_a_line(tmp_path, outrider, more, options, named):
    config = configure(tmp_path / "c.yaml", **more)
    done = outrider("drafts", "recommend", "--config", config, *options)
    assert done.returncode == 1
    assert named in done.stderr
    assert "Traceback" not in done.stderr


ITEMS = [
    {"drafts": [{"method": "suffix", "max_match": 8}]},
    {"adapter": "simulated", "drafts": [{"method": "model", "source": GOOD, "adapter": "simulated"}]},
    {"drafts": []},
]


def test_an_item_with_drafts_of_its_own_is_compared_for_by_its_number(tmp_path, outrider, prompts):
    model = {"source": TARGET, "adapter": "simulated", "replicas": ITEMS}
    config = configure(
        tmp_path / "c.yaml", model=model, drafts=[{"method": "model", "source": DEAR, "adapter": "simulated"}]
    )
    options = ("drafts", "recommend", "--config", config, "--prompts", prompts, "--max-tokens", 8, "--json")
    done = outrider(*options)
    assert done.returncode == 1
    assert "model.replicas[0]: it has drafts of its own; " in done.stderr
    assert "--replica 0" in done.stderr
    done = outrider(*options, "--replica", 1)
    assert done.returncode == 0, done.stderr
    names = {row["name"] for row in json.loads(done.stdout)["candidates"]}
    assert names == {"none", "control", "suffix", f"model {GOOD}", "chain"}, "those of `drafts` are not its own"
    done = outrider(*options, "--replica", 3)
    assert "--replica 3: there are 3 items, from 0" in done.stderr


@pytest.mark.parametrize(
    ("item", "why"),
    [
        ({"endpoint": "http://gpu:8000/v1"}, "another engine's server drafts for itself"),
        ({"host": "10.0.0.3", "drafts": []}, "it runs on 10.0.0.3; compare drafts there"),
    ],
)
def test_an_item_that_does_not_decode_here_is_named(item, why):
    config = ClusterConfig.model_validate(
        {"model": {"source": TARGET, "adapter": "simulated", "replicas": [{"host": "here"}, item]}}
    )
    with pytest.raises(MeasurementError, match=rf"model\.replicas\[1\]: {re.escape(why)}"):
        choose_replica(config, 1)
    assert choose_replica(config, 0).model.replicas == 1


def read(drafts):
    return ClusterConfig.model_validate({"model": {"source": TARGET, "adapter": "simulated"}, "drafts": drafts})


def test_each_draft_is_a_candidate_once_and_the_chain_is_in_order_of_cost(tmp_path):
    config = read([{"method": "model", "source": DEAR, "adapter": "simulated"}])
    found = list_candidates(config, [tmp_path / "a.drafts", tmp_path / "a.drafts"], [DEAR, GOOD, f"{GOOD}&x=1"])
    assert [one.name for one in found][:3] == [f"model {DEAR}", "suffix", "index a"]
    assert len(found) == 5
    chains = chain_candidates(config, found)
    assert [one.name for one in chains] == ["chain"], "the configuration's lone draft is no chain"
    assert [draft.method for draft in chains[0].drafts] == ["suffix", "index", "model", "model", "model"]


def test_the_configurations_own_chain_is_beside_the_chain_of_all():
    config = read([{"method": "suffix"}, {"method": "model", "source": DEAR, "adapter": "simulated"}])
    own = chain_candidates(config, list_candidates(config, [], []))
    assert [one.name for one in own] == ["chain"]
    more = chain_candidates(config, list_candidates(config, [], [GOOD]))
    assert [one.name for one in more] == ["configured", "chain"]
    assert [type(draft) for draft in more[0].drafts] == [SuffixDraft, ModelDraft]


def test_what_is_pasted_says_only_what_was_written():
    (candidate,) = list_candidates(read([{"method": "suffix", "memory": "1 MiB"}]), [], [])
    assert candidate.to_items() == [{"method": "suffix", "memory": 1 << 20}]


def record(tpot_s: float, tokens: int = 11) -> Record:
    return Record(list(range(tokens)), 1.0, 1.0 + tpot_s * (tokens - 1))


def test_the_interval_holds_the_speed_up_and_needs_two_prompts():
    plain, spec = [record(0.02), record(0.02), record(0.02)], [record(0.01), record(0.02), record(0.005)]
    low, high = bootstrap_interval(plain, spec) or (0.0, 0.0)
    assert low == pytest.approx(1.0)
    assert high == pytest.approx(4.0)
    assert bootstrap_interval(plain[:1], spec[:1]) is None
    assert bootstrap_interval([record(0.02, 1)] * 2, [record(0.02, 1)] * 2) is None, "one token has no time between"


def test_long_answers_weigh_more_as_they_do_in_tpot():
    plain, spec = [record(0.02, 1001), record(0.02, 11)], [record(0.01, 1001), record(0.02, 11)]
    low, high = bootstrap_interval(plain, spec) or (0.0, 0.0)
    assert low == pytest.approx(1.0)
    assert high == pytest.approx(2.0)


def way(speed_up, interval):
    return {
        "speed_up": speed_up,
        "interval": interval,
        "tokens_per_s": 100.0 * speed_up,
        "mean_acceptance_length": 2.0 * speed_up,
    }


def test_none_is_recommended_where_no_interval_is_above_1():
    ways = {"none": way(1.0, [1.0, 1.0]), "suffix": way(1.4, [0.9, 1.9]), "chain": way(1.2, None)}
    assert choose_drafts(ways)["name"] == "none"
    said = describe_recommendation(
        {
            "recommended": "none",
            "alike": [],
            "control_interval": None,
            "worst_router_share": None,
            "identical": True,
            "yaml": "drafts: []",
        }
    )
    assert "none of the drafts pays" in said[0]
    assert said[-1] == "drafts: []"


def test_the_fastest_that_pays_is_recommended_and_those_alike_are_named():
    ways = {
        "none": way(1.0, [1.0, 1.0]),
        "control": way(1.7, [1.6, 1.8]),
        "suffix": way(1.5, [1.2, 1.8]),
        "model x": way(1.1, [1.05, 1.2]),
        "chain": way(1.6, [1.3, 1.9]),
        "index y": way(3.0, [0.9, 5.0]),
    }
    assert choose_drafts(ways) == {"name": "chain", "speed_up": 1.6, "interval": [1.3, 1.9], "alike": ["suffix"]}
    found = compare_chain(ways)
    assert found["best_single"] == "index y"
    assert found["router_share"] == pytest.approx(1.6 / 3.0)
    assert found["length_share"] == pytest.approx(1.6 / 3.0)
    assert found["chain_vs_plain"] == pytest.approx(1.6)


def test_categories_are_compared_by_their_own_prompts():
    prompts = [Prompt("1", "b", [1]), Prompt("2", "a", [1])]
    by_way = {"none": [record(0.02), record(0.02)], "suffix": [record(0.01), record(0.04)]}
    first, second = describe_categories(prompts, by_way)
    assert (first["category"], first["ways"]["suffix"]["speed_up"]) == ("a", pytest.approx(0.5))
    assert (second["category"], second["ways"]["suffix"]["speed_up"]) == ("b", pytest.approx(2.0))
    assert first["router_share"] is None, "one draft is no chain"
