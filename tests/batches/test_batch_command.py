"""`outrider batch` against a real daemon: each line exactly once, whoever is killed in between."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from outrider_lab.free_port import find_free_port

from tests.batches.support import (
    count_results,
    kill_worker,
    line_of,
    read_results,
    slow_down,
    slow_script,
    start_batch,
    wait_until,
    write_input,
)
from tests.support.daemon import Daemon, configuration, running


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("batch")
    with running(configuration(directory, script=slow_script(directory), extra="drafts: []")) as started:
        yield started


def finish(process: Any, code: int = 0) -> str:
    output, problems = process.communicate(timeout=180)
    assert process.returncode == code, problems
    return str(output) + str(problems)


def texts_of(path: Path) -> dict[str, str]:
    found = {}
    for result in read_results(path):
        choice = result["response"]["body"]["choices"][0]
        found[result["custom_id"]] = choice["text"] if "text" in choice else choice["message"]["content"]
    return found


def test_a_killed_worker_and_a_killed_batch_lose_and_double_nothing(tmp_path, daemon):
    source = write_input(tmp_path / "in.jsonl", [line_of(number) for number in range(60)])
    output, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    other = write_input(tmp_path / "other.jsonl", ["", *(line_of(number) for number in range(60))])
    finish(start_batch(other, whole, daemon.url))  # with other keys, or its answers would be told again
    first = start_batch(source, output, daemon.url, "--concurrency", "8")
    wait_until(lambda: count_results(output) >= 8)
    kill_worker(daemon)
    wait_until(lambda: count_results(output) >= 24)
    first.kill()
    first.communicate()
    second = start_batch(source, output, daemon.url, "--json")
    wait_until(lambda: count_results(output) >= 30)
    kill_worker(daemon)
    summary = json.loads(finish(second).splitlines()[0])
    assert summary["lines"] == summary["done"] == 60
    assert summary["errors"] == summary["unfinished"] == 0
    assert summary["from_earlier_runs"] >= 24
    results = read_results(output)
    assert sorted(result["custom_id"] for result in results) == sorted(f"line-{number}" for number in range(60))
    assert texts_of(output) == texts_of(whole)
    for result in results:
        assert result["response"]["status_code"] == 200
        assert result["response"]["request_id"] == result["id"]
        assert result["error"] is None


def test_a_killed_daemon_is_waited_for(tmp_path):
    config = configuration(tmp_path, script=slow_script(tmp_path), extra="drafts: []")
    port = str(find_free_port())
    source = write_input(tmp_path / "in.jsonl", [line_of(number) for number in range(40)])
    output = tmp_path / "out.jsonl"
    with slow_down(tmp_path), running(config, "--port", port) as daemon:
        process = start_batch(source, output, daemon.url, "--json", "--concurrency", "4")
        wait_until(lambda: count_results(output) >= 5)
        daemon.kill()
    with running(config, "--port", port):
        summary = json.loads(finish(process).splitlines()[0])
    assert summary["done"] == 40
    assert summary["retries"] > 0
    assert len({result["custom_id"] for result in read_results(output)}) == count_results(output) == 40


def test_an_answer_that_was_lost_with_its_client_is_not_computed_again(tmp_path, daemon):
    line = line_of(0)
    line["body"] = {"model": "toy", "prompt": "no seed: drawn anew by each new request", "max_tokens": 16}
    source = write_input(tmp_path / "in.jsonl", [line])
    for name in ("a", "b"):
        finish(start_batch(source, tmp_path / name, daemon.url))
    first, second = ((tmp_path / name).read_text() for name in ("a", "b"))
    assert json.loads(first)["response"]["body"]["id"] == json.loads(second)["response"]["body"]["id"]


def test_bad_lines_are_reported_and_do_not_stop_the_rest(tmp_path, daemon):
    refused = line_of(4)
    refused["body"] |= {"temperature": 9}
    lines = [
        line_of(0),
        "this is no JSON",
        {"url": "/v1/completions", "body": {}},
        line_of(0, url="/v1/chat/completions"),
        line_of(3, url="/v1/embeddings"),
        refused,
        "",
        line_of(7),
    ]
    source, output = write_input(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    said = finish(start_batch(source, output, daemon.url))
    assert f"{source}:2: is no JSON" in said
    assert f"{source}:4: an earlier line has the custom_id 'line-0' too" in said
    results = read_results(output)
    errors = {result["error"]["code"] for result in results if result["error"]}
    assert errors == {
        "invalid_json_line",
        "missing_custom_id",
        "duplicate_custom_id",
        "invalid_url",
        "invalid_value",
    }
    assert len(results) == 7
    assert sum(result["error"] is None for result in results) == 2
    (bad,) = [result for result in results if result["response"] and result["response"]["status_code"] == 400]
    assert bad["response"]["body"]["error"]["param"] == "temperature"
    finish(start_batch(source, output, daemon.url))
    assert count_results(output) == 7


def test_a_torn_last_line_is_repaired_and_a_strange_output_is_left_alone(tmp_path, daemon):
    source, output = write_input(tmp_path / "in.jsonl", [line_of(0), line_of(1)]), tmp_path / "out.jsonl"
    finish(start_batch(source, output, daemon.url, "--concurrency", "1"))
    whole = output.read_bytes()
    output.write_bytes(whole[:-20])
    finish(start_batch(source, output, daemon.url))
    assert [result["custom_id"] for result in read_results(output)] == ["line-0", "line-1"]
    other = write_input(tmp_path / "other.jsonl", [line_of(5)])
    kept = output.read_bytes()
    said = finish(start_batch(other, output, daemon.url), code=1)
    assert f"{output}:1: is the result of another input" in said
    notes = tmp_path / "notes.txt"
    notes.write_text("my only copy")
    assert "is no result of a batch" in finish(start_batch(source, notes, daemon.url), code=1)
    assert output.read_bytes() == kept
    assert notes.read_text() == "my only copy"


def test_one_run_at_a_time_and_one_that_is_stopped_can_be_resumed(tmp_path, daemon):
    source = write_input(tmp_path / "in.jsonl", [line_of(number) for number in range(40)])
    output = tmp_path / "out.jsonl"
    with slow_down(daemon.log.parent):
        first = start_batch(source, output, daemon.url, "--concurrency", "2")
        wait_until(lambda: count_results(output) >= 2)
        assert "another run writes it now" in finish(start_batch(source, output, daemon.url), code=1)
        first.send_signal(signal.SIGTERM)
        assert "the same command goes on" in finish(first, code=1)
    assert 2 <= len(read_results(output)) < 40
    finish(start_batch(source, output, daemon.url))
    assert len({result["custom_id"] for result in read_results(output)}) == count_results(output) == 40


def test_a_server_that_stays_away_ends_the_run_with_one_line(tmp_path):
    source = write_input(tmp_path / "in.jsonl", [line_of(0)])
    url = f"http://127.0.0.1:{find_free_port()}"
    said = finish(start_batch(source, tmp_path / "out.jsonl", url, "--patience", "0.5"), code=1)
    assert "has not answered for 0.5 s" in said
    assert "Traceback" not in said
