"""Runs a comparison: engines are loaded, asked alone, together and about texts that a float32 reference has written."""

from __future__ import annotations

import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from adapters.contract import AdapterError
from adapters.device_memory import read_host_memory
from adapters.energy import energy_meter
from adapters.model_store import ModelStore
from adapters.tokenizer import Tokenizer
from orchestrator.worker.measuring.prompts import OWN_PROMPTS, PromptText, spread
from orchestrator.worker.measuring.quality import reference_texts
from outrider_lab.bench.compare.engines import Asked, list_engines
from outrider_lab.bench.compare.figures import (
    FORMULAS,
    EngineRun,
    ReferenceAnswers,
    compare_rows,
    list_pairs,
    list_requests,
    summarise_engine,
)
from outrider_lab.bench.compare.peers import compare_with_peers, summarise_beside
from outrider_lab.bench.compare.turns import NamedPrompt, Tell, Turns, load_engines
from outrider_lab.peers.contract import PeerPrompt

_WARM_PROMPTS = 2


@dataclass(frozen=True, slots=True)
class CompareSize:
    """How much is asked: tokens of an answer, passes, requests together (1: leave that out), prompts of the quality
    (0: leave it out)."""

    max_tokens: int
    passes: int
    at_once: int
    quality_limit: int


def compare_engines(asked: Asked, texts: Sequence[PromptText], size: CompareSize, tell: Tell) -> dict[str, Any]:
    """Return `summary` (a row for each engine and mode), `requests`, `environment`, `commands` and `formulas`. Raises
    BenchError."""
    tokenizer = Tokenizer.load(Path(asked.tokenizer))
    prompts = encode_prompts(texts, tokenizer)
    specs = list_engines(asked)
    reference, why = _find_reference(asked, prompts, size.quality_limit, tell)
    meter = energy_meter("cpu")
    with (
        tempfile.TemporaryDirectory(prefix="outrider-compare-") as logs,
        load_engines(specs, Path(logs), tell) as (sides, runs),
    ):
        turns = Turns(sides, size.max_tokens, meter, tell)
        turns.warm_up([one.prompt for one in encode_prompts(OWN_PROMPTS[:_WARM_PROMPTS], tokenizer)])
        turns.ask_alone(prompts, size.passes)
        if size.at_once > 1:
            turns.ask_together(prompts, size.at_once, size.passes)
        if reference is not None:
            turns.score(reference.texts)
        turns.note_memory()
    return report_of(runs, prompts, reference, size.at_once) | {
        "commands": list_commands(runs),
        "environment": describe_environment(asked, size, len(prompts))
        | {
            "energy": meter.name or f"not measurable here: {meter.reason}",
            "quality": "the file's exact values in float32, numpy" if reference is not None else f"not measured: {why}",
        },
    }


def report_of(
    runs: Sequence[EngineRun], prompts: Sequence[NamedPrompt], reference: ReferenceAnswers | None, at_once: int
) -> dict[str, Any]:
    """Return the rows with their ratios, those to other engines' best modes, `figures` of Outrider beside the best of
    all, the formulas, and the times of every answer."""
    categories = {one.key: one.category for one in prompts}
    rows = [summarise_engine(run, categories, reference) for run in runs]
    compare_rows(rows, runs, categories)
    requests = [one for run in runs for one in list_requests(run)]
    pairs = [one for run in runs for one in list_pairs(run)]
    beside = compare_with_peers(rows)
    return {
        "summary": rows,
        "beside_peers": beside,
        "figures": summarise_beside(rows, beside, at_once),
        "formulas": FORMULAS,
        "requests": requests,
        "pairs": pairs,
    }


def encode_prompts(texts: Sequence[PromptText], tokenizer: Tokenizer) -> list[NamedPrompt]:
    stop_tokens = sorted(tokenizer.eos_ids)
    return [
        NamedPrompt(
            f"{number}-{text.key}",
            text.category,
            PeerPrompt(text.text, tokenizer.encode_chat([{"role": "user", "content": text.text}]), stop_tokens),
        )
        for number, text in enumerate(texts)
    ]


def list_commands(runs: Sequence[EngineRun]) -> list[str]:
    """Return the command that was given, and those that started servers."""
    started = [run.described.get("command", "") for run in runs]
    return [" ".join(["outrider", *sys.argv[1:]]), *filter(None, started)]


def _find_reference(
    asked: Asked, prompts: Sequence[NamedPrompt], limit: int, tell: Tell
) -> tuple[ReferenceAnswers | None, str]:
    if not limit:
        return None, "left out (--quality-limit 0)"
    chosen = spread(list(prompts), min(limit, len(prompts)))

    def progress(stage: str, fraction: float) -> None:
        tell(stage, int(max(fraction, 0.0) * 100), 100)

    store = ModelStore(Path(asked.options.model.store))
    try:
        directory = Path(asked.tokenizer).parent
        file = store.whole(asked.source, progress)
        found = reference_texts(directory, file, [one.prompt.tokens for one in chosen], progress)
    except AdapterError as error:
        return None, str(error)
    answers = {one.key: text[begin + 1 :] for one, text, begin in zip(chosen, found.tokens, found.begins, strict=True)}
    perplexity = math.exp(-fmean(found.log_probabilities))
    return ReferenceAnswers(answers, found.tokens, found.begins, perplexity), ""


def describe_environment(asked: Asked, size: CompareSize, prompts: int) -> dict[str, Any]:
    from adapters.hardware import processor

    hardware = processor()
    return {
        "processor": hardware.name,
        "flags": list(hardware.isa),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": read_host_memory().total_bytes,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "model": asked.source.source,
        "threads": asked.threads,
        "prompts": prompts,
        "max_tokens": size.max_tokens,
        "passes": size.passes,
        "at_once": size.at_once,
    }


@contextmanager
def show_turns() -> Iterator[Tell]:
    """Show what is being done: with a bar on a terminal, else in a line for each stage, with the time since the
    beginning."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield tell_lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1)

        def tell(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        yield tell


def tell_lines() -> Tell:
    """Return what writes a line to stderr when a stage begins."""
    began_s, last = time.monotonic(), ""

    def tell(stage: str, _done: int, _total: int) -> None:
        nonlocal last
        if stage != last:
            minutes, seconds = divmod(int(time.monotonic() - began_s), 60)
            print(f"{minutes:d}:{seconds:02d} {stage}", file=sys.stderr, flush=True)
            last = stage

    return tell
