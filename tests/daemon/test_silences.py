"""A real daemon's streams speak while its worker is slow, or dies and is started again."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import httpx

from orchestrator.daemon.api.question import COMMENT
from tests.support.daemon import configuration, running

ASK = {"model": "toy", "prompt": "The sea#", "max_tokens": 60, "temperature": 0, "stream": True}
USAGE = {"include_usage": True}


def configure(directory: Path, script: str) -> Path:
    """A daemon that is impatient with silences."""
    path = configuration(directory, script=script)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("api: {", "api: {headers_after_s: 0.1, keep_alive_s: 0.1, "), encoding="utf-8")
    return path


def read(url: str) -> tuple[list[str], str, int]:
    """The blocks of the stream, its text, and how many of its tokens are counted."""
    body = ASK | {"stream_options": USAGE}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200
    blocks = answer.text.removesuffix("\n\n").split("\n\n")
    events = [json.loads(block.removeprefix("data: ")) for block in blocks if block.startswith("data: {")]
    text = "".join(event["choices"][0]["text"] for event in events if event["choices"])
    return blocks, text, events[-1]["usage"]["completion_tokens"]


def test_a_stream_speaks_while_its_worker_is_started_again(tmp_path: Path):
    calm, broken = tmp_path / "calm", tmp_path / "broken"
    calm.mkdir()
    broken.mkdir()
    with running(configure(calm, "")) as daemon:
        _, expected, tokens = read(daemon.url)
    with running(
        configure(broken, f"base_ms=20&load_ms=3000&fault=abort&at=20&arm=35&once={tmp_path}/marker")
    ) as daemon:
        blocks, text, counted = read(daemon.url)
    assert (tmp_path / "marker").exists()
    pings = [place for place, block in enumerate(blocks) if block == COMMENT.decode().strip()]
    assert len(pings) >= 4
    first = next(place for place, block in enumerate(blocks) if block.startswith("data: "))
    assert any(first < place < len(blocks) - 3 for place in pings), "between tokens"
    assert (text, counted) == (expected, tokens)


def test_a_stream_speaks_before_its_first_token(tmp_path: Path):
    more = {"max_tokens": 2, "speculative_config": {"num_speculative_tokens": 3}, "stream_options": USAGE}
    slow = tmp_path / "slow"
    with running(configure(tmp_path, f"drift_ms=3000&drift_while={slow}")) as daemon, ExitStack() as stack:
        slow.touch()
        answer = stack.enter_context(httpx.stream("POST", f"{daemon.url}/v1/completions", json=ASK | more, timeout=60))
        assert answer.headers["X-Accel-Buffering"] == "no"
        assert answer.headers["X-Outrider-Speculation"] == "num_speculative_tokens=3; by=request"
        lines = answer.iter_lines()
        assert next(lines) == COMMENT.decode().strip()
        slow.unlink()
        *_, last = (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {"))
    effective = last["metrics"]["speculative_decoding"]["effective"]
    assert (effective["num_speculative_tokens"], effective["by"]) == (3, "request")
