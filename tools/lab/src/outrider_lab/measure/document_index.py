"""Measures a store of documents: questions whose answers it has, and others, beside plain suffix drafts.

Two sets of documents are tried. "answers": what the model says to each question in other words, as a list of answered
questions has it. "unrelated": this repository's documentation. Requests with the store and without take turns, over one
daemon: without it they name no store. Prefix reuse and the memory of earlier answers are off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from tests.support.daemon import Daemon, running
from outrider_lab.measure.draft_store import TOPICS
from outrider_lab.measure.prediction import OWN_TEXT, configure

ROOT = Path(__file__).parent.parent
WRITTEN = "What should a visitor know about {topic}? Answer in plain words."
ASKED = "What should a visitor know about {topic}? Answer in plain words, please."
STORES = ("answers", "unrelated")


def ask(daemon: Daemon, question: str, max_tokens: int, stores: list[str] | None = None) -> tuple[str, float, int]:
    """Return an answer, the time behind its first token, and its tokens. `stores`: None where there is none to name."""
    extra = {} if stores is None else {"draft_stores": stores}
    stream = daemon.client.chat.completions.create(
        model=daemon.client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=extra,
    )
    text, first_s, tokens = "", 0.0, 0
    for chunk in stream:
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        if chunk.choices and chunk.choices[0].delta.content:
            first_s = first_s or time.perf_counter()
            text += chunk.choices[0].delta.content
    return text, time.perf_counter() - first_s, tokens


def make_stores(given: dict[str, Any], directory: Path, count: int, max_tokens: int) -> None:
    """Make both stores. The documents of "answers" are written by the model, without any store."""
    answers = directory / "answers"
    answers.mkdir()
    config = configure(given, directory, [OWN_TEXT])
    with running(config) as daemon:
        for topic in TOPICS[:count]:
            text = ask(daemon, WRITTEN.format(topic=topic), max_tokens)[0]
            (answers / f"{topic}.txt").write_text(text, encoding="utf-8")
    for name, documents in (("answers", answers), ("unrelated", ROOT / "docs")):
        command = ["drafts", "index", str(documents), "--config", str(config), "-o", str(directory / f"{name}.drafts")]
        subprocess.run([sys.executable, "-m", "orchestrator.cli.main", *command], check=True, capture_output=True)


def measure(daemon: Daemon, count: int, max_tokens: int, turns: int) -> list[dict[str, Any]]:
    """Return a row for each question, turn and store. Raises SystemExit where a store changes an answer."""
    rows = []
    for topic in TOPICS[:count]:
        question = ASKED.format(topic=topic)
        for turn in range(turns):
            plain, plain_s, tokens = ask(daemon, question, max_tokens, [])
            for store in STORES:
                text, took_s, _ = ask(daemon, question, max_tokens, [store])
                if text != plain:
                    raise SystemExit(f"{topic}, {store}: the answer is another one")
                ratio = plain_s / took_s
                rows.append({"topic": topic, "turn": turn, "store": store, "tokens": tokens, "ratio": ratio})
    return rows


def main() -> None:
    """Print the table. Exits with 1 where an answer with a store is another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "cluster.yaml", help="drafts, api and state are replaced")
    parser.add_argument("--questions", type=int, default=8, help=f"{len(TOPICS)} at most")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write all rows here, too")
    options = parser.parse_args()
    given = yaml.safe_load(options.config.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        make_stores(given, base, options.questions, options.max_tokens)
        stores = [{"method": "index", "path": f"{name}.drafts"} for name in STORES]
        with running(configure(given, base, [OWN_TEXT, *stores])) as daemon:
            rows = measure(daemon, options.questions, options.max_tokens, options.turns)
            yields = daemon.status()["totals"]["by_drafter"]
    table = Table("store", "times the speed without it (median)", "least", "most", "drafted", "accepted")
    for store in STORES:
        ratios = [row["ratio"] for row in rows if row["store"] == store]
        counts = yields.get(f"index-{store}", {"drafted": 0, "accepted": 0})
        figures = [f"{of(ratios):.2f}" for of in (statistics.median, min, max)]
        table.add_row(store, *figures, str(counts["drafted"]), str(counts["accepted"]))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
