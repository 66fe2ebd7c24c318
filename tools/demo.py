"""`make demo`: the daemon from the shipped cluster.yaml, a streamed answer, prompts with and without speculation.

Starts `outrider serve` on a free port, speaks to it with the `openai` client only, and stops it with SIGTERM.
Exits 1 when an output differs or the daemon does not end cleanly.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
from rich.console import Console
from rich.progress import track

from adapters.hardware import processor
from orchestrator.plain_table import print_table

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = Path(__file__).resolve().parent / "prompts.jsonl"
MAX_TOKENS = 64
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
console = Console()


@dataclass
class Answer:
    """One streamed answer. Times are seconds from the request; `metrics` are the daemon's own figures."""

    text: str = ""
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)


def wait_until_ready(daemon: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Poll /ready, saying what the daemon says it is doing. Exits when it ends or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    with console.status("starting the daemon") as status:
        while time.monotonic() < deadline:
            if daemon.poll() is not None:
                end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
                sys.exit(f"the daemon ended with {daemon.returncode} before it was ready:\n{end}")
            try:
                response = httpx.get(f"{url}/ready", timeout=2.0)
                if response.status_code == httpx.codes.OK:
                    return
                status.update(response.json()["error"]["message"])
            except (httpx.TransportError, ValueError, KeyError):
                pass
            time.sleep(0.1)
    sys.exit(f"the daemon was not ready after {START_TIMEOUT_S:.0f} s; its log is {log}")


def ask(client: OpenAI, model: str, text: str, *, speculate: bool, show: bool = False) -> Answer:
    """Stream one greedy chat answer and time its chunks."""
    answer = Answer()
    started = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        max_tokens=MAX_TOKENS,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"speculative_config": {"method": "auto" if speculate else "off"}},
    )
    for chunk in stream:
        now_s = time.perf_counter() - started
        if chunk.choices and chunk.choices[0].delta.content:
            answer.first_s = answer.first_s or now_s
            answer.last_s = now_s
            answer.text += chunk.choices[0].delta.content
            if show:
                console.print(chunk.choices[0].delta.content, end="", highlight=False, markup=False)
        if chunk.usage is not None:
            answer.tokens = chunk.usage.completion_tokens
            answer.metrics = (chunk.model_extra or {}).get("metrics", {}).get("speculative_decoding", {})
    return answer


def compare(client: OpenAI, model: str) -> bool:
    """Decode the prompts in turn with and without speculation, print the table, return whether all agree."""
    prompts = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    plain: list[Answer] = []
    spec: list[Answer] = []
    for number, prompt in enumerate(track(prompts, "decoding with and without speculation", console=console)):
        runs = [(plain, False), (spec, True)]
        for answers, speculate in runs if number % 2 == 0 else reversed(runs):
            answers.append(ask(client, model, prompt["turns"][0], speculate=speculate))
    identical = all(a.text == b.text and a.tokens == b.tokens for a, b in zip(plain, spec, strict=True))
    title = f"{len(prompts)} prompts, {MAX_TOKENS} tokens, greedy, through the API"
    print_table(("", "plain", "speculative"), _rows(plain, spec), title=title, numbers=True)
    console.print(f"identical output: {'yes' if identical else 'NO'}", style="bold green" if identical else "bold red")
    console.print(
        "TPOT = sum(latency - TTFT) / sum(n - 1); tokens/s = tokens / sum of latencies (prefill included)\n"
        "acceptance rate = accepted / drafted; mean acceptance length = 1 + accepted / verification steps",
        style="dim",
        highlight=False,
    )
    return identical


def _rows(plain: list[Answer], spec: list[Answer]) -> list[tuple[str, str, str]]:
    def ttft_ms(answers: list[Answer]) -> float:
        return sum(a.first_s for a in answers) * 1000.0 / len(answers)

    def tpot_ms(answers: list[Answer]) -> float:
        return sum(a.last_s - a.first_s for a in answers) * 1000.0 / sum(a.tokens - 1 for a in answers)

    def speed(answers: list[Answer]) -> float:
        return sum(a.tokens for a in answers) / sum(a.last_s for a in answers)

    drafted = sum(a.metrics.get("num_draft_tokens", 0) for a in spec)
    accepted = sum(a.metrics.get("num_accepted_draft_tokens", 0) for a in spec)
    steps = sum(a.metrics.get("num_spec_steps", 0) for a in spec)
    return [
        ("TTFT ms", f"{ttft_ms(plain):.0f}", f"{ttft_ms(spec):.0f}"),
        ("TPOT ms", f"{tpot_ms(plain):.2f}", f"{tpot_ms(spec):.2f}"),
        ("tokens/s", f"{speed(plain):.1f}", f"{speed(spec):.1f}"),
        ("acceptance rate", "-", f"{accepted / max(1, drafted):.2f}"),
        ("mean acceptance length", "1.00", f"{1 + accepted / max(1, steps):.2f}"),
        ("speed-up (TPOT)", "1.00x", f"{tpot_ms(plain) / tpot_ms(spec):.2f}x"),
        ("speed-up (tokens/s)", "1.00x", f"{speed(spec) / speed(plain):.2f}x"),
    ]


def show_class(config: Path, port: int) -> None:
    """Say on which processor this runs, and in which numerical class, and why."""
    command = [sys.executable, "-m", "orchestrator.cli.main", "status", "--json"]
    status = subprocess.run(
        [*command, "--config", str(config), "--port", str(port)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    ready = json.loads(status.stdout)["ready"]
    for name, value in (
        ("processor", processor().name),
        ("runtime", f"{ready['adapter']} on {ready['device_name']}"),
        ("class", f"{ready['numerical_class']}; fingerprint {ready['class_fingerprint']}"),
        ("why", ready["class_reason"]),
        *(("not", rejected) for rejected in ready["classes_rejected"]),
    ):
        console.print(f"{name}: {value}", style="dim", highlight=False, markup=False)


def main() -> int:
    """Run the demo."""
    with socket.socket() as probe:  # a port that nobody listens on now
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "orchestrator.cli.main", "serve"]
    command += ["--config", str(ROOT / "cluster.yaml"), "--port", str(port)]
    with tempfile.NamedTemporaryFile(prefix="outrider-demo-", suffix=".log", delete=False) as log:
        daemon = subprocess.Popen(command, cwd=ROOT, stderr=log)
    console.print(f"the daemon's log is {log.name}", style="dim", highlight=False)
    try:
        wait_until_ready(daemon, url, Path(log.name))
        client = OpenAI(base_url=f"{url}/v1", api_key="unused")
        model = client.models.list().data[0].id
        show_class(ROOT / "cluster.yaml", port)
        console.print(f"\n[bold]{model}[/bold] answers at {url}/v1 (streamed):")
        ask(client, model, "Name three things to see in a small harbour town.", speculate=True, show=True)
        console.print("\n")
        identical = compare(client, model)
    finally:
        daemon.send_signal(signal.SIGTERM)
        try:
            code = daemon.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            code = daemon.wait()
    console.print(f"the daemon stopped with exit code {code}")
    return 0 if identical and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
