"""Stores of documents in real daemons: made by the command, named by requests, told by status; no answer changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError

from tests.support.daemon import Daemon, configuration, outrider_process, running

TOKENS = 60
PROMPTS = ["the lighthouse keeper", "seven ships went out", "a letter to the mayor"]
FIXED = "speculation: {method: fixed, num_speculative_tokens: 8}\n"
GREEDY, SEEDED = {"temperature": 0.0}, {"temperature": 0.9, "seed": 11}


def answer(daemon: Daemon, prompt: str, **fields: Any) -> str:
    chosen = {"max_tokens": TOKENS, **GREEDY} | fields
    return daemon.client.completions.create(model="toy", prompt=prompt, **chosen).choices[0].text


def count_drafts(daemon: Daemon, drafter: str = "index-handbook") -> tuple[int, int]:
    """Tokens of a drafter that were verified, and that became output."""
    daemon.wait_for("", streams=0)
    found = daemon.status()["totals"]["by_drafter"].get(drafter, {"drafted": 0, "accepted": 0})
    return found["drafted"], found["accepted"]


@pytest.fixture(scope="module")
def served(plain: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon whose documents have what is answered to the prompts, and beside that a store of something else."""
    directory = tmp_path_factory.mktemp("indexed")
    for name, texts in (("handbook", [answer(plain, prompt) for prompt in PROMPTS]), ("other", ["nothing of it"])):
        documents = directory / name
        (documents / "deeper").mkdir(parents=True)
        for number, text in enumerate(texts):
            (documents / "deeper" / f"{number}.txt").write_text(text, encoding="utf-8")
        (documents / "picture.bin").write_bytes(b"\xff\xfe\x00")
        (documents / ".hidden").write_text("hidden", encoding="utf-8")
    drafts = ", ".join(f"{{method: index, path: {name}.drafts}}" for name in ("handbook", "other"))
    config = configuration(directory, extra=f"drafts: [{{method: suffix, memory: 0 B}}, {drafts}]\n{FIXED}")
    for name in ("handbook", "other"):
        made = outrider_process(
            *("drafts", "index", str(directory / name), "--config", str(config), "--json"),
            *("--output", str(directory / f"{name}.drafts")),
        )
        assert made.returncode == 0, made.stderr
        told = json.loads(made.stdout)
        assert told["left_out"] == ["picture.bin"]
        assert told["documents"] == (3 if name == "handbook" else 1)
    with running(config) as daemon:
        yield daemon


def test_documents_are_drafted_from_and_no_answer_changes(plain, served):
    for prompt in PROMPTS:
        for sampling in (GREEDY, SEEDED):
            assert answer(served, prompt, **sampling) == answer(plain, prompt, **sampling)
    drafted, accepted = count_drafts(served)
    assert accepted > 0.25 * TOKENS * len(PROMPTS)  # the model repeats itself, and its own text comes first
    assert drafted >= accepted


def test_a_request_names_its_stores(plain, served):
    before = count_drafts(served)
    for stores in ([], ["other"]):
        assert answer(served, PROMPTS[0], extra_body={"draft_stores": stores}) == answer(plain, PROMPTS[0])
    assert count_drafts(served) == before
    answer(served, PROMPTS[0], extra_body={"draft_stores": ["handbook"]})
    assert count_drafts(served)[1] > before[1]
    with pytest.raises(BadRequestError) as refused:
        answer(served, PROMPTS[0], extra_body={"draft_stores": ["nowhere"]})
    assert refused.value.param == "draft_stores"
    assert "handbook, other" in refused.value.message


def test_status_and_metrics_tell_the_yield_of_each_store(served):
    answer(served, PROMPTS[1])
    found = {one["name"]: one for one in served.status()["replicas"][0]["gauges"]["drafters"]}
    assert found["index-handbook"]["method"] == "index"
    assert found["index-handbook"]["memory_bytes"] > found["index-other"]["memory_bytes"] > 0
    metrics = httpx.get(f"{served.url}/metrics").text
    assert 'outrider_drafter_accepted_tokens_total{drafter="index-handbook"' in metrics
    shown = outrider_process("status", "--socket", str(served.admin)).stdout
    assert "drafter index-handbook" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        (None, "", "c.drafts is no file; make it with `outrider drafts index DIR`"),
        (b"x" * 2000, ", memory: 1 KiB", "drafts[0].memory: the store has 2000 bytes"),
        (b"no store", "", "is no store of documents; make it with `outrider drafts index DIR`"),
    ],
)
def test_a_store_that_cannot_be_used_is_told_with_its_place(tmp_path: Path, text, options, says):
    if text is not None:
        (tmp_path / "c.drafts").write_bytes(text)
    config = configuration(tmp_path, extra=f"drafts: [{{method: index, path: c.drafts{options}}}]")
    found = outrider_process("serve", "--config", str(config))
    assert found.returncode != 0
    assert says in found.stderr + found.stdout
    assert "Traceback" not in found.stderr


def test_nothing_to_index_is_told(tmp_path: Path):
    config = configuration(tmp_path)
    (tmp_path / "empty").mkdir()
    for directory, says in (("empty", "has no text files"), ("missing", "is no directory")):
        found = outrider_process("drafts", "index", str(tmp_path / directory), "--config", str(config))
        assert (found.returncode, says in found.stderr) == (1, True), found.stderr
