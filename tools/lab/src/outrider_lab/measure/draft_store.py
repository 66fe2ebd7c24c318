"""Measures a draft store: tokens per verification with it and without, for the same prompts, similar and other ones.

A daemon over a toy model, or over the cluster.yaml of --config, answers prompts with an empty store. Then another one
answers each group of prompts, once with that store and once without. Each remembers its own answers in both cases.

With --users, users ask for texts and then for variants of them, in new conversations, once without and once with a tag.
No store is used, and workers remember nothing: as on a busy worker, another replica, or after a restart.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from orchestrator.config.draft_store import MEMORY
from tests.support.daemon import Daemon, running

TOY = {"source": "simulated:toy", "adapter": "simulated", "name": "toy"}
TOPICS = (
    "lighthouses",
    "tides",
    "bread",
    "glaciers",
    "clocks",
    "bridges",
    "bees",
    "maps",
    "salt",
    "kites",
    "owls",
    "ink",
)
ASKED = "Write a short note on {topic} for the {reader}, with two examples and one date, in plain words."
GROUPS = ("same", "similar", "other")
VARIANTS = (" Make it shorter.", " End it with an invitation to a museum.", " Give it a title and a closing sentence.")


def list_prompts(group: str, count: int) -> list[str]:
    """Return the prompts of a group. The first daemon is asked the "same" ones."""
    if group == "other":
        return [f"{index + 3} {TOPICS[-1 - index % len(TOPICS)]}: why, where, since when?" for index in range(count)]
    reader = "village school" if group == "same" else "harbour museum"
    return [ASKED.format(topic=TOPICS[index % len(TOPICS)], reader=reader) for index in range(count)]


class Bench:
    """Runs daemons over one configuration, with the store or without."""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self._directory, self._options = directory, options
        self._given = yaml.safe_load(options.config.read_text(encoding="utf-8")) if options.config else {"model": TOY}
        self._store = options.store or f"disk:{directory / 'drafts.sqlite'}"
        self._runs = 0

    @contextmanager
    def serve(self, *, stored: bool, remembers: bool = True) -> Iterator[Daemon]:
        """Run a daemon that has nothing of earlier ones but the store. `remembers`: a worker knows its own answers."""
        self._runs += 1
        own = self._directory / f"run-{self._runs}"
        own.mkdir()
        suffix: dict[str, Any] = {"method": "suffix", "store": self._store if stored else MEMORY}
        if not remembers:
            suffix["memory"] = "0 B"
        if stored:
            suffix["store_options"] = {"wait_ms": self._options.wait_ms}
        text = {
            **self._given,
            "drafts": [suffix],
            "api": {"port": 0, "admin_socket": str(own / "admin.sock")},
            "state": {"directory": str(own / "state")},
            "logging": {"format": "json"},
        }
        path = own / "cluster.yaml"
        path.write_text(yaml.safe_dump(text), encoding="utf-8")
        with running(path) as daemon:
            yield daemon

    def measure(self, prompts: Sequence[str], *, stored: bool) -> dict[str, Any]:
        """Return what a new daemon needed for these prompts, one after the other."""
        with self.serve(stored=stored) as daemon:
            started_s = time.perf_counter()
            answers = [self._ask(daemon, prompt) for prompt in prompts]
            took_s = time.perf_counter() - started_s
            status = daemon.status()
            totals, store = status["totals"], status["draft_store"]
        return {
            "answers": answers,
            "took_s": took_s,
            "tokens_per_verification": totals["generated"] / max(1, totals["rounds"]),
            "hits": store["hits"] if store else 0,
            "late": store["late"] if store else 0,
        }

    def measure_users(self, count: int, *, tagged: bool) -> dict[str, Any]:
        """Return what a new daemon needed for so many users, in turn, each with a text and its variants."""
        with self.serve(stored=False, remembers=False) as daemon:
            answers = [
                self._ask(daemon, list_prompts("same", count)[user] + ask, f"user {user}" if tagged else "")
                for ask in ("", *VARIANTS)
                for user in range(count)
            ]
            totals = daemon.status()["totals"]
        return {"answers": answers, "tokens_per_verification": totals["generated"] / max(1, totals["rounds"])}

    def fill(self, prompts: Sequence[str]) -> None:
        """Let a daemon answer these prompts for the store."""
        with self.serve(stored=True) as daemon:
            for prompt in prompts:
                self._ask(daemon, prompt)

    def _ask(self, daemon: Daemon, prompt: str, user: str = "") -> str:
        model = daemon.client.models.list().data[0].id
        chosen = {"max_tokens": self._options.max_tokens, "temperature": 0.0}
        found = daemon.client.completions.create(model=model, prompt=prompt, user=user, **chosen)
        return str(found.choices[0].text)


def measure_all(bench: Bench, count: int) -> list[dict[str, Any]]:
    """Return a row for each group. Other groups' answers are written too, so the "same" prompts come first."""
    bench.fill(list_prompts("same", count))
    rows = []
    for group in GROUPS:
        prompts = list_prompts(group, count)
        without, with_it = (bench.measure(prompts, stored=stored) for stored in (False, True))
        rows.append(
            {
                "prompts": group,
                "without": without["tokens_per_verification"],
                "with": with_it["tokens_per_verification"],
                "time_ratio": without["took_s"] / with_it["took_s"],
                "hits": with_it["hits"],
                "late": with_it["late"],
                "same_answers": without["answers"] == with_it["answers"],
            }
        )
    return rows


def compare_users(options: argparse.Namespace) -> None:
    """Print what tags bring. Exits with 1 where an answer is another one."""
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory), options)
        without, tagged = (bench.measure_users(options.users, tagged=tagged) for tagged in (False, True))
    ratio = tagged["tokens_per_verification"] / without["tokens_per_verification"]
    told = [f"{name} {one['tokens_per_verification']:.3f}" for name, one in (("without", without), ("with", tagged))]
    print(f"tokens per verification, {options.users} users in turn: {told[0]}, {told[1]} tags ({ratio:.3f} x)")
    if without["answers"] != tagged["answers"]:
        raise SystemExit("an answer with tags is another one")


def main() -> None:
    """Print the table. Exits with 1 where an answer with the store is another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="a cluster.yaml; drafts, api, state and logging are replaced")
    parser.add_argument("--store", help="as drafts[].store; a file by default. It should be empty")
    parser.add_argument("--wait-ms", type=float, default=5.0, help="as store_options.wait_ms")
    parser.add_argument("--prompts", type=int, default=12, help="prompts of each group")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    parser.add_argument("--users", type=int, default=0, help="so many users with variants of their texts, instead")
    options = parser.parse_args()
    if options.users:
        compare_users(options)
        return
    with tempfile.TemporaryDirectory() as directory:
        rows = measure_all(Bench(Path(directory), options), options.prompts)
    table = Table("prompts", "without", "with", "time without / with", "hits", "late", "answers")
    for row in rows:
        ratios = (f"{row['without']:.2f}", f"{row['with']:.2f}", f"{row['time_ratio']:.2f}")
        told = "the same" if row["same_answers"] else "DIFFER"
        table.add_row(row["prompts"], *ratios, str(row["hits"]), str(row["late"]), told)
    Console().print(table, "tokens per verification: every round commits at least one", sep="\n")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if not all(row["same_answers"] for row in rows):
        raise SystemExit("an answer with the store is another one")


if __name__ == "__main__":
    main()
