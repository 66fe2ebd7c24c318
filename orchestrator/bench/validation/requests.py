"""The requests of all runs, and what the drafter proposes along what the target says to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from orchestrator.bench.policy.recorder import record_drafts
from orchestrator.bench.prompts import PromptText, read_texts
from orchestrator.bench.validation.runs import ValidationRun
from orchestrator.loading.engine import build_loop
from orchestrator.loading.models import LoadedTarget, load_tokenizer
from orchestrator.loading.options import EngineOptions
from orchestrator.measuring.texts import TEXTS
from orchestrator.workers.messages import Submit
from policies.speculation.replay.recorded import RecordedRequest

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
    """Return a run's prompts. No two of all runs are the same: a server remembers what it said. Raises BenchError."""
    given = read_texts(prompts) if prompts is not None else [PromptText("", one, text) for one, text in TEXTS]
    found = []
    for place in range(run.requests):
        text = given[(number * 31 + place) % len(given)]
        own = f"Request {number}.{place}. {text.text}"
        long = f"{_LONG}{own}" if run.mixed and place % 3 == 0 else own
        found.append(PromptText(f"{number}.{place}", text.category, long))
    return found


def record_runs(
    texts: Sequence[Sequence[PromptText]],
    options: EngineOptions,
    target: LoadedTarget,
    max_tokens: int,
    advanced: Callable[[], None],
) -> list[RunRequests]:
    """Let the target say what it says to all prompts, eight at a time, and ask the drafter along all of it, in order.
    What it says does not depend on how it is served. Raises OutriderError."""
    tokenizer = load_tokenizer(target.tokenizer_dir)
    stops = sorted(tokenizer.eos_ids)
    submits = [
        Submit(text.key, tokenizer.encode_chat([{"role": "user", "content": text.text}]), max_tokens, stop_tokens=stops)
        for some in texts
        for text in some
    ]
    outputs: dict[str, list[int]] = {one.request_id: [] for one in submits}
    loop = build_loop(target, msgspec.structs.replace(options, prefix_reuse=False), None)
    for submit in submits:
        loop.submit(submit)
    while not loop.idle:
        for delta in loop.run_round_strictly().deltas:
            outputs[delta.request_id] += delta.tokens
            if delta.finish:
                advanced()
    recorded = {one.key: one for one in record_drafts(submits, outputs, options, target, lambda: None)["good"]}
    prompts = {one.request_id: len(one.prompt) for one in submits}
    return [
        RunRequests(
            some,
            [recorded.get(text.key, RecordedRequest(text.key, (), text.category, prompts[text.key])) for text in some],
            [prompts[text.key] for text in some],
            [len(outputs[text.key]) for text in some],
        )
        for some in texts
    ]
