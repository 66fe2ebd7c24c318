"""`outrider drafts build` on a tiny random target: killed, gone on with, over one's own prompts and texts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.generating.data import Shards
from tests.support import tiny_models
from tests.support.daemon import outrider_process

FEW = ("--concurrency", "4", "--max-tokens", "24")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny target and its cluster.yaml."""
    here = tmp_path_factory.mktemp("build")
    tiny_models.write_model(here / "target", "llama", kind="BF16")
    (here / "cluster.yaml").write_text(
        "model:\n  source: target\n  adapter: openvino_rt\n"
        "limits: {kv_cache: 16 MiB, max_batch_rows: 64}\n"
        "drafts: [{method: suffix, statistics: same.statistics}]\n"  # which is not there yet
        f"store: {{directory: '{here / 'store'}'}}\n"
    )
    return here


def build(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return outrider_process("drafts", "build", "--config", str(place / "cluster.yaml"), *FEW, *arguments)


def test_a_build_that_was_killed_goes_on_and_loses_no_finished_text(place):
    data = place / "data"
    command = [sys.executable, "-m", "orchestrator.cli.main", "drafts", "build", "--config", place / "cluster.yaml"]
    process = subprocess.Popen([*command, *FEW, "--data", data, "--tokens", "1000000"], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 240
        while not list(data.glob("texts-*.npz")):
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = {(one.number, one.head): one.tokens.tolist() for one in Shards(data).texts()}
    made = build(place, "--data", str(data), "--tokens", "2500", "--json")
    assert made.returncode == 0, made.stderr
    told = json.loads(made.stdout)
    after = [((one.number, one.head), one.tokens.tolist()) for one in Shards(data).texts()]
    assert len(dict(after)) == len(after), "a conversation was had twice"
    assert before.items() <= dict(after).items()
    assert told["tokens"] >= 2500
    assert 0 < told["entries"] < told["tokens"] * 3
    assert Path(told["path"]).stat().st_size == told["bytes"]
    assert told["kept_beside_model"]
    again = build(place, "--data", str(data), "--tokens", "2500", "--output", str(place / "same.statistics"))
    assert again.returncode == 0, again.stderr
    assert "statistics: " + str(place / "same.statistics") in again.stdout
    one, other = (file.read_bytes()[-told["entries"] :] for file in (place / "same.statistics", Path(told["path"])))
    assert one == other


def test_ones_own_prompts_and_texts_are_written_about(place):
    (place / "prompts.jsonl").write_text('{"turns": ["hello there"]}\n{"prompt": "hello hello"}\n')
    (place / "texts").mkdir()
    (place / "texts" / "one.txt").write_text("hello the tell " * 100)
    for option, name in (("--prompts", "prompts.jsonl"), ("--texts", "texts")):
        data = place / f"data-{name}"
        made = build(place, option, str(place / name), "--data", str(data), "--tokens", "600", "-o", str(place / "own"))
        assert made.returncode == 0, made.stderr
        texts = list(Shards(data).texts())
        assert sum(len(one.top_ids) for one in texts) >= 600
        other = build(place, "--data", str(data), "--tokens", "5000", "-o", str(place / "own"))
        assert (other.returncode, "was written over other prompts" in other.stderr) == (1, True), other.stderr
    heads = {tuple(one.tokens[: one.head].tolist()) for one in Shards(place / "data-prompts.jsonl").texts()}
    assert len(heads) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--prompts", "missing.jsonl"), "missing.jsonl: cannot be read"),
        (("--texts", "missing"), "is no directory"),
        (("--prompts", "a", "--texts", "b"), "give one of them"),
        (("--model", "nobody"), "has no model 'nobody'"),
    ],
)
def test_what_cannot_be_built_is_told(place, arguments, says):
    found = build(place, *arguments)
    assert found.returncode == 1
    assert says in found.stderr
    assert "Traceback" not in found.stderr
