"""Measures predicted outputs through a daemon: files that come back with one line edited, against plain decoding.

Each file is a function of this repository. The model is asked to return it, greedily and without speculation: that
answer is what has to come back in every other case. The prediction is that answer with its middle line as it was before
the edit. Cases take turns over each file: plain, drafts of the text itself, the prediction, and two that cannot help
or help fully: an unrelated file, and the answer itself. Prefix reuse and the memory of earlier answers are off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from tests.support.daemon import Daemon, running

ROOT = Path(__file__).parent.parent
FILES = (
    "policies/speculation/pid.py",
    "policies/speculation/calibration.py",
    "policies/speculation/draft_chain.py",
    "policies/speculation/odds.py",
    "policies/sampling/penalties.py",
    "policies/serving/drift.py",
)
CASES = ("plain", "own text", "edited", "unrelated", "right")
OWN_TEXT = {"method": "suffix", "memory": "0 B"}
"""Drafts from the request's own text alone."""
ASKED = "Return this Python file. Answer with the file alone, and change nothing else.\n\n{text}"


def configure(given: dict[str, Any], directory: Path, drafts: list[dict[str, Any]]) -> Path:
    """Write a cluster.yaml of the given one with these drafts, in which no request finds another's prefill done."""
    text = {
        **given,
        "drafts": drafts,
        "limits": {**given.get("limits", {}), "prefix_reuse": False},
        "api": {"port": 0, "admin_socket": str(directory / "admin.sock")},
        "state": {"directory": str(directory / "state")},
        "logging": {"format": "json"},
    }
    path = directory / "cluster.yaml"
    path.write_text(yaml.safe_dump(text), encoding="utf-8")
    return path


def read_texts(count: int, lines: int) -> list[str]:
    """Return the last lines of some files: code rather than headings."""
    return ["\n".join((ROOT / name).read_text(encoding="utf-8").splitlines()[-lines:]) for name in FILES[:count]]


def undo_edit(answer: str) -> str:
    """Return an answer as it was before its middle line was edited."""
    lines = answer.split("\n")
    lines[len(lines) // 2] = "    before = measure_all(the_previous, state, of=requests)  # as it was"
    return "\n".join(lines)


class Bench:
    """Asks one daemon."""

    def __init__(self, daemon: Daemon, max_tokens: int) -> None:
        self._daemon, self._max_tokens = daemon, max_tokens
        self._model = daemon.client.models.list().data[0].id

    def ask(self, text: str, prediction: str | None, *, plain: bool = False) -> dict[str, Any]:
        """Ask for a file; return the answer, what it took, and the usage. `plain`: without speculation."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": ASKED.format(text=text)}],
            "max_tokens": self._max_tokens,
            "temperature": 0.0,
            "seed": 1,
        }
        if plain:
            body["extra_body"] = {"speculative_config": {"method": "off"}}
        if prediction is not None:
            body["prediction"] = {"type": "content", "content": prediction}
        began_s, first_s, answer, usage = time.perf_counter(), 0.0, "", None
        for chunk in self._daemon.client.chat.completions.create(
            **body, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            said = chunk.choices[0].delta.content if chunk.choices else None
            if said:
                first_s = first_s or time.perf_counter()
                answer += said
        ended_s = time.perf_counter()
        return {"answer": answer, "all_s": ended_s - began_s, "decode_s": ended_s - first_s, "usage": usage}


def measure(bench: Bench, texts: list[str], turns: int) -> list[dict[str, Any]]:
    """Return a row for each file, turn and case. Raises SystemExit where an answer is another one."""
    rows = []
    for number, text in enumerate(texts):
        answer = bench.ask(text, None, plain=True)["answer"]
        predictions = {"edited": undo_edit(answer), "unrelated": texts[number - 1], "right": answer}
        for turn in range(turns):
            for case in CASES:
                found = bench.ask(text, predictions.get(case), plain=case == "plain")
                if found["answer"] != answer:
                    raise SystemExit(f"file {number}, {case}: the answer is another one")
                details = found["usage"].completion_tokens_details
                rows.append(
                    {
                        "file": number,
                        "turn": turn,
                        "case": case,
                        "prompt_tokens": found["usage"].prompt_tokens,
                        "tokens": found["usage"].completion_tokens,
                        "all_s": found["all_s"],
                        "decode_s": found["decode_s"],
                        "accepted": details.accepted_prediction_tokens if details else 0,
                        "rejected": details.rejected_prediction_tokens if details else 0,
                    }
                )
    return rows


def summarise(rows: list[dict[str, Any]]) -> Table:
    """Return a table: what each case takes beside plain decoding of the same file in the same turn."""
    plain = {(row["file"], row["turn"]): row for row in rows if row["case"] == "plain"}
    table = Table("case", "times plain, whole answer", "times plain, behind the first token", "accepted", "rejected")
    for case in CASES:
        own = [row for row in rows if row["case"] == case]
        whole, decode = (
            statistics.median(plain[row["file"], row["turn"]][key] / row[key] for row in own)
            for key in ("all_s", "decode_s")
        )
        tokens = sum(row["tokens"] for row in own)
        counts = (f"{sum(row[key] for row in own) / tokens:.0%}" for key in ("accepted", "rejected"))
        table.add_row(case, f"{whole:.2f}", f"{decode:.2f}", *counts)
    return table


def main() -> None:
    """Print the table. Exits with 1 where an answer with a prediction is another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "cluster.yaml", help="drafts, api and state are replaced")
    parser.add_argument("--files", type=int, default=4, help=f"how many files, {len(FILES)} at most")
    parser.add_argument("--lines", type=int, default=40, help="lines of each file")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--json", type=Path, help="write all rows here, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = configure(yaml.safe_load(options.config.read_text(encoding="utf-8")), Path(directory), [OWN_TEXT])
        with running(path) as daemon:
            rows = measure(Bench(daemon, options.max_tokens), read_texts(options.files, options.lines), options.turns)
    lengths = sorted({(row["file"], row["prompt_tokens"], row["tokens"]) for row in rows})
    shown = ", ".join(f"{prompt} + {tokens}" for _, prompt, tokens in lengths)
    Console().print(summarise(rows), f"tokens of prompts and answers: {shown}", sep="\n")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
