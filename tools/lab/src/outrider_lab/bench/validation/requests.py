"""The requests of all runs, and what the drafter proposes along what the target says to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from adapters.tokenizer import load_tokenizer
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.worker.loading.engine import build_loop
from orchestrator.worker.loading.models import LoadedSource
from orchestrator.worker.measuring.prompts import PromptText, read_texts
from outrider_lab.bench.policy.recorder import record_drafts
from outrider_lab.bench.validation.runs import Place, ValidationRun
from outrider_lab.replay.recorded import RecordedRequest

_APART = 48  # prompts from one run's first to the next one's
_FORMS = (
    ("explaining", "Explain in three sentences what one should know about {}."),
    ("listing", "List six facts about {}, one a line."),
    ("writing", "Write the beginning of a story in which {} matter."),
    ("letter", "Write a short letter to a friend about {}."),
    ("coding", "Write a Python class that models {}, with two methods."),
    ("comparing", "Compare {} of today with those of a hundred years ago."),
    ("advice", "Give four pieces of advice to somebody who works with {}."),
    ("dialogue", "Write a dialogue of two people who disagree about {}."),
    ("planning", "Plan a week in which a class learns about {}: one line for each day."),
    ("asking", "Ask five questions that an expert on {} would be glad to hear."),
    ("selling", "Write an advertisement of three sentences for {}."),
    ("reasoning", "Why could a town decide to spend less on {}? Give reasons for and against."),
)
_TOPICS = (
    *("lighthouses", "bicycles", "bees", "bridges", "libraries", "volcanoes", "potatoes", "railways", "clocks"),
    *("glaciers", "violins", "deserts", "elevators", "maps", "rivers", "windmills", "horses", "telescopes", "gardens"),
    *("harbours", "schools", "forests", "kitchens", "islands", "castles", "markets", "tunnels", "museums", "storms"),
    *("engines", "shoes", "stamps", "whales", "spices", "roofs", "letters", "wells", "candles", "mirrors", "ropes"),
    *("kites", "canals", "dialects", "orchards", "comets", "quarries", "puppets", "ferries", "locks", "beehives"),
    *("barns", "compasses", "sails", "dictionaries", "chimneys", "parades", "tides", "oceans", "pianos", "meadows"),
    *("lanterns", "coins", "fossils", "looms", "trams"),
)
_LONG = (
    "Here are notes that you may need. " * 3
    + "The tide tables were printed each spring, and the harbour master kept the old ones in a chest by the door. " * 8
)


@dataclass(frozen=True, slots=True)
class RunRequests:
    """The prompts of one run, and of each the tokens that the target says, and its drafts along them."""

    texts: Sequence[PromptText]
    recorded: Sequence[RecordedRequest]
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]


def choose_texts(prompts: Path | None, run: ValidationRun, number: int) -> list[PromptText]:
    """Return the prompts of the run of this number. No two of a place's runs with drafts have the same, nor are answers
    alike: a drafter remembers what it drafted for. Plain runs and other places may have them again. Raises
    BenchError."""
    given = read_texts(prompts) if prompts is not None else _write_texts()
    found = []
    for place in range(run.requests):
        text = given[(number * _APART + place) % len(given)]
        is_long = run.mixed and place % 3 == 0
        key = f"{number}.{place}{' long' if is_long else ''}"
        found.append(PromptText(key, text.category, f"{_LONG}{text.text}" if is_long else text.text))
    return found


def number_runs(runs: Sequence[ValidationRun]) -> list[int]:
    """Return the number of each run: from 0 among those of its place that draft too, or do not."""
    known: Counter[tuple[Place, bool]] = Counter()
    found = []
    for run in runs:
        found.append(known[run.place, run.speculates])
        known[run.place, run.speculates] += 1
    return found


def _write_texts() -> list[PromptText]:
    """Return every form of question on every topic, the form changing first."""
    return [PromptText("", name, form.format(topic)) for topic in _TOPICS for name, form in _FORMS]


def list_drafted(
    runs: Sequence[ValidationRun], texts: Sequence[Sequence[PromptText]]
) -> dict[tuple[Place, int], list[str]]:
    """Return which prompts each drafter reads along with, in order. Each place is a daemon of its own, whose drafter is
    another one, and has read nothing, from the middle of a run on in which its worker is lost."""
    found: dict[tuple[Place, int], list[str]] = {}
    lost: Counter[Place] = Counter()
    for run, some in zip(runs, texts, strict=True):
        keys = [text.key for text in some] if run.speculates else []
        half = len(keys) // 2 if run.fault else len(keys)
        found.setdefault((run.place, lost[run.place]), []).extend(keys[:half])
        if run.fault:
            lost[run.place] += 1
            found[run.place, lost[run.place]] = keys[half:]
    return found


def record_runs(
    runs: Sequence[ValidationRun],
    texts: Sequence[Sequence[PromptText]],
    options: EngineOptions,
    target: LoadedSource,
    max_tokens: int,
) -> list[RunRequests]:
    """Let the target say what it says to the prompts of all runs, several at a time and each once, and ask the drafter
    along it, in order. What the target says does not depend on how it is served. Raises OutriderError."""
    tokenizer = load_tokenizer(target.tokenizer_dir)
    stops = sorted(tokenizer.eos_ids)
    unlike = {text.key: text for some in texts for text in some}
    keys_read = {text.key for run, some in zip(runs, texts, strict=True) if not run.ignores_ends for text in some}
    submits = {
        key: Submit(
            key,
            tokenizer.encode_chat([{"role": "user", "content": text.text}]),
            max_tokens,
            stop_tokens=stops,
            route=text.category,
        )
        for key, text in unlike.items()
    }
    outputs: dict[str, list[int]] = {key: [] for key in submits}
    loop = build_loop(target, msgspec.structs.replace(options, prefix_reuse=False), None)
    for key in sorted(keys_read):
        loop.submit(submits[key])
    while not loop.idle:
        for delta in loop.run_round_strictly().deltas:
            outputs[delta.request_id] += delta.tokens
    recorded = {
        (place, one.key): one
        for (place, _), keys in list_drafted(runs, texts).items()
        for one in record_drafts([submits[key] for key in keys], outputs, options, target, lambda: None)["good"]
    }
    return [
        RunRequests(
            some,
            [
                (recorded.get((run.place, text.key)) if run.speculates else None)
                or RecordedRequest(text.key, (), text.category)
                for text in some
            ],
            [len(submits[text.key].prompt) for text in some],
            [max_tokens if run.ignores_ends else len(outputs[text.key]) for text in some],
        )
        for run, some in zip(runs, texts, strict=True)
    ]
