"""Measures one draft worker that two targets share: the drafts a second that both get, beside those of one alone.

    python -m outrider_lab.measure.shared_draft [--source SOURCE] [--adapter NAME] [--cores 1] [--sequences 1,4] [--depth 4]
                                       [--round-ms 60] [--turns 5] [--seconds 6] [--json OUT]

The draft worker is a real one, in a process on `--cores`. Targets are processes that ask it round by round. They wait
as long as verification on a device of their own takes (`--round-ms`), and go on in a text of their own. That is a
model's greedy text with a strange token now and then, or this repository's documentation (`--text docs`). One target
alone and two together take turns in one run, so that other work on the machine disturbs both alike.
`simulated:toy?base_ms=B&row_ms=R` is a draft whose passes sleep, on a device that no other work shares. Ratios are of
drafts a second, and "by worker time" of drafts for a second of the worker's processor time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from adapters.hardware import processor
from device_profiles.units import MS_PER_S
from outrider_lab.bench.draft_process import DraftProcess, start_draft_process
from orchestrator.clock import SystemClock
from orchestrator.config.model import ClusterConfig
from orchestrator.drafting.model import ModelDrafter
from orchestrator.drafting.port import Ask
from orchestrator.drafting.remote import RemoteDrafter, RemoteLimits
from orchestrator.links.address import LinkEndpoint
from orchestrator.loading.drafters import draft_state
from orchestrator.loading.models import load_model, load_tokenizer, silent
from orchestrator.loading.options import DraftWorkerOptions, draft_specs, engine_options
from orchestrator.loading.vocabularies import prepare_tokenizer
from orchestrator.workers.cores import pin_to_cores
from orchestrator.workers.messages import Sampling

DOCS = Path(__file__).parents[1] / "docs"
PROMPT_TOKENS = 48
TEXT_TOKENS = 900
STRANGE_EVERY = 7
WARM_UP_S = 2.0


@dataclass(frozen=True)
class TargetFigures:
    """What one target got in a turn. `drafted` tokens came to it, of which its text has `accepted`."""

    seconds: float
    rounds: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Setting:
    """How a target plays."""

    texts: list[list[int]]
    depth: int
    round_ms: float
    seconds: float
    cores: list[int]


def play(door: LinkEndpoint, fingerprint: str, setting: Setting, told: Connection[Any, Any]) -> None:
    """Be a target, and tell what it got."""
    pin_to_cores(setting.cores)
    connected: list[str] = []
    drafter = RemoteDrafter(
        "draft",
        fingerprint=fingerprint,
        device="ELSEWHERE",
        limits=RemoteLimits(max_wait_ms=1000.0),
        clock=SystemClock(),
        report=lambda link: connected.append(link.state),
    )
    drafter.attach(door)
    while "connected" not in connected:
        time.sleep(0.01)
    at = [PROMPT_TOKENS] * len(setting.texts)
    for number, text in enumerate(setting.texts):
        drafter.begin(f"s{number}", text[:PROMPT_TOKENS], Sampling())
    began_s = time.perf_counter() + WARM_UP_S
    began = False
    rounds = drafted = accepted = 0
    while (now_s := time.perf_counter()) < began_s + setting.seconds:
        counts = now_s >= began_s
        if counts and not began:
            began = True
            told.send(None)
        asks = [Ask(f"s{number}", setting.depth, round_ms=setting.round_ms) for number in range(len(setting.texts))]
        drafts = drafter.propose(asks)
        time.sleep(setting.round_ms / MS_PER_S)  # the target verifies, on a device of its own
        rounds += counts
        for number, (text, draft) in enumerate(zip(setting.texts, drafts, strict=True)):
            start = at[number]
            right = 0
            while right < len(draft.tokens) and draft.tokens[right] == text[start + right]:
                right += 1
            drafted += counts * len(draft.tokens)
            accepted += counts * right
            at[number] = start + right + 1
            drafter.extend(f"s{number}", text[start : at[number]])
            if at[number] + setting.depth + 1 >= len(text):
                at[number] = PROMPT_TOKENS
                drafter.end(f"s{number}", keep=False)
                drafter.begin(f"s{number}", text[:PROMPT_TOKENS], Sampling())
    seconds = time.perf_counter() - began_s
    drafter.close()
    told.send(TargetFigures(seconds, rounds, drafted, accepted))


@dataclass(frozen=True)
class Turn:
    """What targets got at the same time, and the processor time that the worker took for it."""

    targets: list[TargetFigures]
    worker_s: float

    @property
    def drafted(self) -> int:
        """Draft tokens of all targets."""
        return sum(one.drafted for one in self.targets)

    @property
    def drafts_per_s(self) -> float:
        """Draft tokens a second of all targets."""
        return sum(one.drafted / one.seconds for one in self.targets)

    @property
    def drafts_per_worker_s(self) -> float:
        """Draft tokens for a second of the worker's processor time, which other work on the machine does not take."""
        return self.drafted / self.worker_s if self.worker_s else 0.0


def run_turn(worker: DraftProcess, settings: Sequence[Setting]) -> Turn:
    """Let these targets play at the same time."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in settings]
    processes = [
        context.Process(target=play, args=(worker.endpoint, worker.fingerprint, setting, theirs), daemon=True)
        for setting, (_, theirs) in zip(settings, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    for ours, _ in pipes:
        ours.recv()
    before_s = worker.read_used_s()
    found = [ours.recv() for ours, _ in pipes]
    turn = Turn(found, worker.read_used_s() - before_s)
    for process in processes:
        process.join()
    return turn


def build_options(source: str, adapter: str, cores: list[int], most: int) -> DraftWorkerOptions:
    """Return a draft worker's options, as a configuration with such a draft and two replicas makes them."""
    draft = {
        "method": "model",
        "source": source,
        "adapter": adapter,
        "process": "own",
        "overlap": "always",
        "cores": cores,
        "workers": {"min": 1},
    }
    config = ClusterConfig.model_validate(
        {
            "model": {"source": source, "adapter": adapter, "replicas": 2},
            "drafts": [draft],
            "limits": {"max_running": most},
        }
    )
    (spec,) = draft_specs(engine_options(config, Path()), config)
    return msgspec.convert(spec.options, DraftWorkerOptions)


def write_texts(options: DraftWorkerOptions, count: int, kind: str) -> list[list[int]]:
    """Return so many texts as tokens."""
    if kind == "docs":
        tokenizer = load_tokenizer(prepare_tokenizer(options.draft))
        told = "\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md")))
        tokens = tokenizer.encode(told, special=False)
        length = min(TEXT_TOKENS, len(tokens) // count)
        return [tokens[number * length : (number + 1) * length] for number in range(count)]
    loaded = load_model(options.draft.model, count, silent)
    vocabulary = loaded.model.spec.vocabulary_size
    drafter = ModelDrafter(
        loaded.model, draft_state(options.draft, loaded), SystemClock(), vocabulary=vocabulary, prefill_ms=1000.0
    )
    texts = [[(7 * place + 31 * number + 3) % 250 for place in range(PROMPT_TOKENS)] for number in range(count)]
    for number, text in enumerate(texts):
        drafter.begin(f"{number}", text, Sampling())
    asks = [Ask(f"{number}", STRANGE_EVERY) for number in range(count)]
    while len(texts[0]) < TEXT_TOKENS:
        for number, draft in enumerate(drafter.propose(asks)):
            more = list(draft.tokens) or [0]
            more[-1] = (more[-1] + 1) % 250
            texts[number].extend(more)
            drafter.extend(f"{number}", more)
    drafter.close()
    return texts


def list_spare_cores(cores: Sequence[int]) -> list[int]:
    """Return the cores that are left to targets."""
    usable = sorted(os.sched_getaffinity(0))
    return [core for core in usable if core not in cores] or usable


def measure(options: DraftWorkerOptions, arguments: argparse.Namespace, sequences: int) -> dict[str, Any]:
    """Return the figures of one number of sequences for each target."""
    cores = parse_numbers(arguments.cores)
    texts = write_texts(options, 2 * sequences, arguments.text)
    shared = (arguments.depth, arguments.round_ms, arguments.seconds, list_spare_cores(cores))
    settings = [Setting(texts[part * sequences : (part + 1) * sequences], *shared) for part in (0, 1)]
    lone: list[Turn] = []
    both: list[Turn] = []
    loads = []
    with start_draft_process(options, cores) as worker:
        for turn in range(arguments.turns):
            lone.append(run_turn(worker, [settings[turn % 2]]))
            both.append(run_turn(worker, settings))
            loads.append(os.getloadavg()[0])
    rates = [[turn.drafts_per_s for turn in turns] for turns in (lone, both)]
    costs = [[turn.drafts_per_worker_s for turn in turns] for turns in (lone, both)]
    return {
        "sequences": sequences,
        "lone_drafts_per_s": statistics.median(rates[0]),
        "both_drafts_per_s": statistics.median(rates[1]),
        "ratio": statistics.median(rates[1]) / statistics.median(rates[0]),
        "ratios": [two / one for one, two in zip(*rates, strict=True)],
        "worker_ratio": statistics.median(costs[1]) / statistics.median(costs[0]) if min(costs[0]) else 0.0,
        "lone_acceptance": compute_acceptance(lone),
        "both_acceptance": compute_acceptance(both),
        "load_average": statistics.mean(loads),
        "lone": [asdict(turn) for turn in lone],
        "both": [asdict(turn) for turn in both],
    }


def compute_acceptance(turns: Sequence[Turn]) -> float:
    """Return accepted / drafted tokens over turns."""
    drafted = sum(turn.drafted for turn in turns)
    return sum(one.accepted for turn in turns for one in turn.targets) / drafted if drafted else 0.0


def parse_numbers(text: str) -> list[int]:
    """Read "1,4"."""
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="simulated:toy?base_ms=8&row_ms=0.3")
    parser.add_argument("--adapter", default="simulated")
    parser.add_argument(
        "--cores", default="", help="that the draft worker runs on, as in 1,2; all where there are none"
    )
    parser.add_argument("--sequences", default="1,4", help="of each target")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--round-ms", type=float, default=60.0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--text", choices=("greedy", "docs"), default="greedy")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    numbers = parse_numbers(arguments.sequences)
    options = build_options(arguments.source, arguments.adapter, parse_numbers(arguments.cores), 2 * max(numbers))
    print(f"{arguments.source} on {processor().name}, {os.cpu_count()} cores; worker on {arguments.cores or 'all'}")
    print("sequences   lone/s   both/s   ratio   (least .. most)   by worker time   acceptance lone, both   load")
    found = []
    for sequences in numbers:
        row = measure(options, arguments, sequences)
        found.append(row)
        spread = f"({min(row['ratios']):.2f} .. {max(row['ratios']):.2f})"
        shares = f"{row['lone_acceptance']:.3f}, {row['both_acceptance']:.3f}"
        rates = f"{row['lone_drafts_per_s']:>8.1f} {row['both_drafts_per_s']:>8.1f} {row['ratio']:>7.2f}"
        worth = f"{row['worker_ratio']:>16.2f}"
        print(f"{sequences:>9} {rates} {spread:>17} {worth} {shares:>23} {row['load_average']:>6.1f}", flush=True)
    if arguments.json is not None:
        said = {key: value for key, value in vars(arguments).items() if key != "json"}
        arguments.json.write_text(json.dumps({"processor": processor().name, **said, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
