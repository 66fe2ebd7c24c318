"""Statistics in real daemons: used where they are, told by status and metrics; no answer changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from adapters.tokenizer import load_tokenizer
from adapters.vocabulary import vocabulary_from
from device_profiles.workload import vocabulary_fingerprint
from orchestrator.fitting.worker_options import engine_options
from orchestrator.generating.data import Text
from orchestrator.protocol.load_options import SuffixOptions
from orchestrator.worker.drafting.counts import build_entries, count_contexts, list_positions
from orchestrator.worker.drafting.statistics import StatisticsCard, write_statistics
from orchestrator.worker.loading.statistics import place_statistics
from tests.support.config import parse_config
from tests.support.daemon import Daemon, configuration, outrider_process, running

TOKENS = 60
PROMPTS = ["the lighthouse keeper", "seven ships went out", "a letter to the mayor"]
FIXED = "speculation: {method: fixed, num_speculative_tokens: 8}\n"
GREEDY, SEEDED = {"temperature": 0.0}, {"temperature": 0.9, "seed": 11}
CARD = StatisticsCard("broad", "2026-11-25", 3, 180, 0, {})


def answer(daemon: Daemon, prompt: str, **fields: Any) -> str:
    chosen = {"max_tokens": TOKENS, **GREEDY} | fields
    return daemon.client.completions.create(model="toy", prompt=prompt, **chosen).choices[0].text


def fingerprint() -> str:
    return vocabulary_fingerprint(vocabulary_from("simulated:toy", Path(), lambda _stage, _fraction: None))


def write(path: Path, texts: list[str]) -> Path:
    """Statistics of what stands in texts."""
    tokenizer = load_tokenizer("")
    rows = []
    for number, text in enumerate(texts):
        tokens = np.array(tokenizer.encode(text, special=False), np.int32)
        rows.append(Text(number, tokens, 1, tokens[1:, None], np.zeros((len(tokens) - 1, 1), np.float16)))
    positions = list_positions(rows)
    counted = count_contexts(positions)
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = build_entries(counted, counted, positions, 100_000)
    write_statistics(path, entries, model="toy", vocabulary=fingerprint(), card=CARD)
    return path


@pytest.fixture(scope="module")
def served(plain: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon whose model store has statistics of what it answers to the prompts."""
    directory = tmp_path_factory.mktemp("statistics")
    said = [prompt + answer(plain, prompt) for prompt in PROMPTS]
    write(place_statistics(directory / "store", "toy", fingerprint()), said)
    with running(configuration(directory, extra=f"drafts: [{{method: suffix, memory: 0 B}}]\n{FIXED}")) as daemon:
        yield daemon


def count_accepted(daemon: Daemon) -> int:
    daemon.wait_for("", streams=0)
    return int(daemon.status()["totals"]["by_drafter"].get("suffix", {"accepted": 0})["accepted"])


def test_statistics_in_the_model_store_are_drafted_from_and_no_answer_changes(plain, served, tmp_path):
    config = configuration(tmp_path, extra=f"drafts: [{{method: suffix, memory: 0 B, statistics: none}}]\n{FIXED}")
    with running(config) as without:
        for prompt in PROMPTS:
            for sampling in (GREEDY, SEEDED):
                expected = answer(plain, prompt, **sampling)
                assert answer(served, prompt, **sampling) == answer(without, prompt, **sampling) == expected
        assert count_accepted(served) > count_accepted(without)


def test_status_and_metrics_tell_the_statistics(served):
    (found,) = served.status()["replicas"][0]["gauges"]["drafters"]
    assert found["source"].endswith(f"toy-{fingerprint()}.statistics (180 tokens of toy)")
    assert found["memory_bytes"] >= 13
    shown = outrider_process("status", "--socket", str(served.admin)).stdout
    assert "180 tokens of toy" in " ".join(shown.replace("│", " ").split())
    answer(served, PROMPTS[0])
    served.wait_for("gauges", running=0)
    (found,) = served.status()["replicas"][0]["gauges"]["drafters"]
    brought, said = found["statistics_accepted"], found["statistics_drafted"]
    assert 0 < brought <= said <= found["drafted"]
    shown = outrider_process("status", "--socket", str(served.admin)).stdout
    assert f"{brought} of {said} tokens that only they said accepted" in " ".join(shown.replace("│", " ").split())
    told = httpx.get(f"{served.url}/metrics").text
    assert 'outrider_drafter_accepted_tokens_total{drafter="suffix"' in told
    assert 'outrider_drafter_statistics_accepted_tokens_total{drafter="suffix"' in told


def test_document_stores_that_a_request_names_are_no_statistics(served):
    before = count_accepted(served)
    answer(served, PROMPTS[0], extra_body={"draft_stores": []})
    assert count_accepted(served) > before


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("missing", None, "missing is no file; make it with `outrider drafts build`"),
        ("other", b"something", "drafts[0].statistics: "),
    ],
)
def test_named_statistics_that_cannot_be_used_are_told_with_their_place(tmp_path, name, text, says):
    if text is not None:
        (tmp_path / name).write_bytes(text)
    config = configuration(tmp_path, extra=f"drafts: [{{method: suffix, statistics: {name}}}]")
    found = outrider_process("serve", "--config", str(config))
    assert found.returncode != 0
    assert says in found.stderr + found.stdout
    assert "outrider drafts build" in found.stderr + found.stdout
    assert "Traceback" not in found.stderr


def test_damaged_statistics_that_nobody_named_cost_drafts_only(tmp_path):
    path = write(place_statistics(tmp_path / "store", "toy", fingerprint()), ["some text of some words"])
    path.write_bytes(path.read_bytes()[:-3])
    with running(configuration(tmp_path, extra="drafts: [{method: suffix}]")) as daemon:
        assert answer(daemon, PROMPTS[0])
        (found,) = daemon.status()["replicas"][0]["gauges"]["drafters"]
        assert (found["state"], found["source"]) == ("ok", "")
        assert "is damaged" in found["reason"]
        shown = outrider_process("status", "--socket", str(daemon.admin)).stdout
        assert "is damaged" in " ".join(shown.replace("│", " ").split())


def test_what_a_daemon_said_is_drafted_from_after_its_restart_and_no_answer_changes(plain, tmp_path):
    drafts = "drafts: [{method: suffix, memory: 0 B}]\n"
    questions = [f"{prompt} {number}" for prompt in PROMPTS for number in range(4)]
    expected = {
        (question, number): answer(plain, question, **sampling)
        for question in questions
        for number, sampling in enumerate((GREEDY, SEEDED))
    }
    accepted = []
    for _ in range(2):
        with running(configuration(tmp_path, extra=f"{drafts}{FIXED}")) as daemon:
            source = daemon.status()["replicas"][0]["gauges"]["drafters"][0]["source"]
            for question in questions:
                for number, sampling in enumerate((GREEDY, SEEDED)):
                    assert answer(daemon, question, **sampling) == expected[question, number]
            accepted.append(count_accepted(daemon))
    (grown,) = (tmp_path / "store" / "statistics").glob("*.grown")
    assert f"{grown} (" in source
    assert accepted[1] > accepted[0]
    grown.write_bytes(b"something else")
    with running(configuration(tmp_path, extra=f"{drafts}{FIXED}")) as daemon:
        assert answer(daemon, questions[0]) == expected[questions[0], 0]
        assert daemon.status()["replicas"][0]["gauges"]["drafters"][0]["source"] == ""
    assert grown.with_name(f"{grown.name}.damaged").exists()


@pytest.mark.parametrize(
    ("keys", "growth"),
    [
        ("", "own"),
        (", statistics_growth: shared", "shared"),
        (", statistics_growth: none", "none"),
        (", statistics: none", "none"),
    ],
)
def test_an_operator_chooses_whom_growing_statistics_help(tmp_path, keys, growth):
    text = f"model: {{source: 'simulated:toy', adapter: simulated}}\ndrafts: [{{method: suffix{keys}}}]\n"
    (draft,) = engine_options(parse_config(text, tmp_path / "c.yaml"), tmp_path).drafters
    assert isinstance(draft, SuffixOptions)
    assert draft.growth == growth
