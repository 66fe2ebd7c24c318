"""`outrider bench serve` as a person runs it, against the real daemon over the simulated model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from orchestrator.cli.main import app
from orchestrator.worker.measuring.prompts import MeasurementError
from tests.support.daemon import Daemon, configuration, running

ROOT = Path(__file__).parents[4]
PNG = b"\x89PNG\r\n\x1a\n"


def command(url: str, *arguments: str) -> list[str]:
    prompts = ("--prompts", str(ROOT / "tools" / "prompts.jsonl"))
    return [sys.executable, "-m", "orchestrator.cli.main", "bench", "serve", *prompts, "--url", url, *arguments]


def bench(url: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(url, *arguments),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, **environment},
    )


def result_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def daemon(tmp_path_factory) -> Iterator[Daemon]:
    config = configuration(
        tmp_path_factory.mktemp("bench"),
        script="base_ms=2",
        extra="limits: {max_running: 4, max_waiting: 4}\ndevices: {price_per_hour: 3.6}\nplacement: {currency: EUR}",
    )
    with running(config) as found:
        yield found


@pytest.fixture(scope="module")
def url(daemon) -> str:
    return f"{daemon.url}/v1"


def test_a_closed_loop_keeps_its_concurrency_and_counts_tokens_as_the_server_does(url, daemon, tmp_path):
    out, plots = tmp_path / "out.json", tmp_path / "deep" / "plots"
    before = daemon.status()["totals"]["generated"]
    done = bench(
        url,
        *("--requests", "24", "--concurrency", "3", "--max-tokens", "16", "--ignore-eos", "--warmup", "0"),
        *("--slo", "ttft=60000,e2e=60000", "--json", str(out), "--plots", str(plots)),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "TPOT" in done.stdout
    assert "tpot_ms = (latency - TTFT) / (n - 1)" in done.stdout
    result = result_of(out)
    assert set(result) == {"summary", "runs", "environment", "formulas"}
    summary = result["summary"]
    assert (summary["completed"], summary["failed"], summary["errors"]) == (24, 0, {})
    assert summary["output_tokens"] == 24 * 16 == daemon.status()["totals"]["generated"] - before
    assert summary["max_running"] == 3
    assert 2.0 < summary["mean_running"] <= 3.01
    assert summary["output_tok_s"] == pytest.approx(24 * 16 / summary["duration_s"])
    assert summary["goodput_per_s"] == pytest.approx(summary["requests_per_s"])
    assert (summary["price_per_hour"], summary["price_source"], summary["currency"]) == (3.6, "/metrics", "EUR")
    assert summary["cost_per_million_tokens"] == pytest.approx(0.001 * summary["duration_s"] / (24 * 16) * 1e6)
    assert "cost of a million output tokens" in done.stdout
    assert summary["acceptance_rate"] > 0.0
    assert summary["tokens_per_event"] > 1.0  # speculation: several tokens an event
    assert 0.0 < summary["generator_cpu_share"] < 1.5
    for one in result["runs"][0]["requests"]:
        assert one["generated"] == 16
        assert 0.0 < one["ttft_ms"] <= one["latency_ms"]
        assert one["tpot_ms"] == pytest.approx((one["latency_ms"] - one["ttft_ms"]) / 15)
    assert {path.name for path in plots.iterdir()} == {"ttft.png", "tpot.png", "itl.png", "e2e.png", "load.png"}
    assert all(path.read_bytes().startswith(PNG) and path.stat().st_size > 5_000 for path in plots.iterdir())


def test_an_open_loop_does_not_wait_for_the_server(url, tmp_path):
    out = tmp_path / "out.json"
    done = bench(
        url,
        *("--requests", "20", "--rate", "20", "--arrival", "constant", "--max-tokens", "4", "--endpoint"),
        *("completions", "--json", str(out)),
    )
    assert done.returncode == 0, done.stderr
    result = result_of(out)
    assert result["summary"]["achieved_rate_per_s"] == pytest.approx(20.0, rel=0.1)
    arrivals = [one["arrival_s"] for one in result["runs"][0]["requests"]]
    assert arrivals == pytest.approx([(number + 1) / 20 for number in range(20)])
    assert all(one["sent_s"] >= one["arrival_s"] for one in result["runs"][0]["requests"])
    assert result["environment"]["loop"] == "open"
    assert "its scheduled arrival in an open loop" in done.stdout.replace("\n", "")


def test_what_the_server_refuses_is_counted_by_its_status(url, tmp_path):
    out = tmp_path / "out.json"
    done = bench(url, *("--requests", "40", "--rate", "2000", "--max-tokens", "60"), "--ignore-eos", "--json", str(out))
    assert done.returncode == 0, done.stderr
    summary = result_of(out)["summary"]
    assert summary["errors"] == {"status_429": summary["failed"]}
    assert summary["failed"] > 0
    assert summary["completed"] + summary["failed"] == 40
    assert f"{summary['failed']} x status_429: " in done.stdout


def test_two_bodies_are_compared_in_turns_and_speculation_changes_no_text(url, tmp_path):
    out = tmp_path / "out.json"
    done = bench(
        url,
        *("--requests", "20", "--concurrency", "2", "--max-tokens", "16", "--temperature", "0.7", "--json", str(out)),
        *("--compare-body", '{"speculative_config": {"method": "off"}}'),
    )
    assert done.returncode == 0, done.stderr
    summary = result_of(out)["summary"]
    assert (summary["same_text"], summary["same_text_of"]) == (20, 20)
    assert summary["drafted_tokens"] > 0
    assert summary["compare"]["drafted_tokens"] == 0
    ratio = summary["tpot_ms"]["median"] / summary["compare"]["tpot_ms"]["median"]
    assert summary["ratios"]["tpot_ms_median"] == pytest.approx(ratio)


def test_ctrl_c_prints_what_was_measured_and_frees_the_server(url, daemon, tmp_path):
    out = tmp_path / "out.json"
    process = subprocess.Popen(
        command(url, "--requests", "5000", "--concurrency", "2", "--max-tokens", "64", "--json", str(out)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    before = daemon.status()["totals"]["generated"]
    deadline = time.monotonic() + 120.0
    while daemon.status()["totals"]["generated"] < before + 2_000 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=180)
    assert process.returncode == 130
    assert "Traceback" not in errors
    summary = result_of(out)["summary"]
    assert summary["completed"] > 0
    assert summary["failed"] == 0
    assert summary["completed"] + summary["interrupted"] == 5000
    assert f"interrupted: {summary['interrupted']} of 5000" in shown
    daemon.wait_for("gauges", running=0, waiting=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "nope"), "serves no model 'nope'; it serves toy"),
        (("--slo", "ttft=fast"), "--slo 'ttft=fast'"),
        (("--rate", "3", "--concurrency", "2"), "give one of them"),
        (("--rate", "0"), "--rate 0.0"),
        (("--burstiness", "2"), "--burstiness"),
        (("--header", "x"), "'Name: value'"),
        (("--body", "[]"), "--body: must be a JSON object"),
        (("--body", '{"n": 2, "stream": false}'), "--body: n, stream cannot be set"),
        (("--compare-body", "{"), "--compare-body: not JSON"),
        (("--json", "/nowhere/out.json"), "no such directory"),
        (("--prompts", "/nowhere.jsonl"), "/nowhere.jsonl: cannot be read"),
        (("--timeout", "0.001"), "timeout: no end within 0.001 s"),
    ],
)
def test_what_is_wrong_is_named(url, arguments, message):
    with pytest.raises(MeasurementError, match=re.escape(message)):
        app(command(url, "--requests", "2", *arguments)[3:], standalone_mode=False)


def test_a_run_in_which_every_request_failed_shows_its_figures_and_exits_1(url, tmp_path):
    out = tmp_path / "out.json"
    done = bench(url, "--requests", "3", "--body", '{"temperature": 9}', "--json", str(out))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"outrider: every request to {url} failed; status_400: 'temperature': ")
    assert "3 x status_400: 'temperature': " in done.stdout
    assert result_of(out)["summary"]["ttft_ms"] is None


class Foreign(BaseHTTPRequestHandler):
    """Another engine: no usage, `choices` null at the end, speculation told in /metrics only, under vLLM's names."""

    answered = 0

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._send(
                "text/plain",
                "# TYPE vllm:spec_decode_num_drafts counter\n"
                f'vllm:spec_decode_num_drafts_total{{engine="0"}} {4 * Foreign.answered}\n'
                f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {12 * Foreign.answered}\n'
                f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {6 * Foreign.answered}\n'
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {4 * Foreign.answered}\n',
            )
        else:
            self._send("application/json", '{"data": [{"id": "theirs"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "theirs"
        assert self.headers["Authorization"] == "Bearer sesame"
        assert self.headers["X-Team"] == "blue"
        Foreign.answered += 1
        chunks = [f'{{"choices": [{{"delta": {{"content": "{word}"}}}}]}}' for word in ("a b", "c")]
        self._send("text/event-stream", "".join(f"data: {c}\n\n" for c in [*chunks, '{"choices": null}', "[DONE]"]))

    def _send(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def test_a_foreign_server_without_usage_gets_no_token_figures_and_is_told_so(tmp_path):
    out = tmp_path / "out.json"
    with ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        done = bench(
            f"http://127.0.0.1:{server.server_port}/v1/",
            *("--requests", "6", "--header", "X-Team: blue", "--slo", "tpot=50", "--json", str(out)),
            OPENAI_API_KEY="sesame",
        )
        server.shutdown()
    assert done.returncode == 0, done.stderr
    summary = result_of(out)["summary"]
    assert summary["completed"] == summary["without_token_count"] == 6
    assert summary["output_tok_s"] is summary["tpot_ms"] is summary["goodput_per_s"] is None
    assert summary["ttft_ms"]["median"] > 0.0
    assert summary["speculation_source"] == "/metrics"
    assert summary["acceptance_rate"] == 0.5
    assert summary["mean_acceptance_length"] == 2.5
    assert summary["drafted_tokens"] == 6 * 12  # the warm-up is not in it
    assert "token counts are missing: 6 of 6" in done.stdout
    assert "sesame" not in out.read_text() + done.stdout


def test_a_server_that_is_not_there_is_one_line():
    done = bench("http://127.0.0.1:1/v1")
    assert done.returncode == 1
    assert done.stderr.startswith("outrider: no server answers at http://127.0.0.1:1/v1")


def test_without_matplotlib_plots_are_refused_before_anything_is_sent(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(name='matplotlib')")
    done = bench("http://127.0.0.1:1/v1", "--plots", str(tmp_path / "plots"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == "outrider: --plots needs matplotlib: pip install 'outrider-lab[plots]'\n"


def test_a_price_that_is_given_counts_instead_of_the_servers(url, daemon, tmp_path, outrider):
    out = tmp_path / "out.json"
    both = ("--compare", url, "--price-per-hour", "7.2", "--json", str(out))
    done = bench(url, "--requests", "4", "--max-tokens", "8", "--ignore-eos", *both)
    assert done.returncode == 0, done.stderr
    summary = result_of(out)["summary"]
    assert (summary["price_per_hour"], summary["price_source"]) == (7.2, "--price-per-hour")
    assert (summary["compare"]["price_per_hour"], summary["compare"]["price_source"]) == (3.6, "/metrics")
    costs = (summary["cost_per_million_tokens"], summary["compare"]["cost_per_million_tokens"])
    assert summary["ratios"]["cost_per_million_tokens"] == pytest.approx(costs[0] / costs[1])
    status = daemon.status()["costs"]
    assert status["currency"] == "EUR"
    assert status["price_per_hour"] == 3.6
    assert status["spent"] > 0.0
    shown = " ".join(outrider("status", "--socket", str(daemon.admin)).stdout.split())
    assert "3.6 EUR an hour" in shown
