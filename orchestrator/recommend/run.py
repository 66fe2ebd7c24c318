"""Loads the candidates beside one target, decodes the prompts with each in turn, and says which one to configure."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from adapters.contract import AdapterError
from adapters.tokenizer import load_tokenizer
from orchestrator.config.drafts import AnyDraft
from orchestrator.config.model import ClusterConfig
from orchestrator.errors import OutriderError
from orchestrator.fitting.worker_options import engine_options
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.recommend.candidates import (
    Candidate,
    chain_candidates,
    choose_replica,
    format_drafts,
    list_candidates,
)
from orchestrator.recommend.figures import (
    CONTROL,
    FORMULAS,
    NONE,
    choose_drafts,
    compare_chain,
    describe_categories,
    describe_way,
)
from orchestrator.recommend.record import ModeRun, Prompt, measure_decoding
from orchestrator.worker.drafting.port import Drafter
from orchestrator.worker.loading.drafters import build_drafter
from orchestrator.worker.loading.engine import build_loop
from orchestrator.worker.loading.models import LoadedSource, load_target
from orchestrator.worker.measuring.canary_aside import leave_out_canary
from orchestrator.worker.measuring.prompts import OWN_PROMPTS, MeasurementError, PromptText, read_texts, spread

_WARM_DEPTH = 4  # of requests that are not counted. Any does.
Tell = Callable[[str, float], None]
"""Hears what is being done, and which share of it is done (below 0: that is not known)."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to decode. Its drafter (None: plain decoding) drafts for all requests, as in a server."""

    name: str
    options: EngineOptions
    drafter: Drafter | None = None


def decode_in_turns(
    target: LoadedSource, ways: Sequence[Way], submits: Sequence[Submit], tell: Callable[[int], object]
) -> dict[str, ModeRun]:
    """Decode every request in every way, one at a time; each way comes first, and last, as often as the others. Each
    has one loop, which learns what rounds cost, as a server's does.

    `tell` hears how many requests are done. Raises OutriderError for a request that is refused.
    """
    runs = {way.name: ModeRun("spec" if way.drafter is not None else "plain") for way in ways}
    loops = {way.name: build_loop(target, way.options, way.drafter) for way in ways}
    for number, submit in enumerate(submits):
        turn = number % len(ways)
        for way in (*ways[turn:], *ways[:turn]):
            measure_decoding(loops[way.name], [submit], runs[way.name])
        tell(number + 1)
    return runs


def close_drafters(ways: Sequence[Way]) -> None:
    """Close the drafters, the last one first: OpenVINO gives each model a signal stack, and takes them back right in
    that order only."""
    for way in reversed(ways):
        if way.drafter is not None:
            way.drafter.close()


def read_prompts(path: Path, target: LoadedSource, limit: int) -> list[Prompt]:
    """Read prompts and encode them as the chat API does. Raises MeasurementError naming file and line."""
    texts = read_texts(path)
    return encode_prompts(spread(texts, min(limit, len(texts)) or len(texts)), target)


def encode_prompts(texts: Sequence[PromptText], target: LoadedSource) -> list[Prompt]:
    tokenizer = load_tokenizer(target.tokenizer_dir)
    stop_tokens = sorted(tokenizer.eos_ids)
    return [
        Prompt(text.key, text.category, tokenizer.encode_chat([{"role": "user", "content": text.text}]), stop_tokens)
        for text in texts
    ]


def warm_up(target: LoadedSource, options: EngineOptions, drafter: Drafter | None) -> None:
    """Let runtimes compile their shapes, on prompts of our own: what a drafter learns of them helps with no other.

    Drafts have a fixed depth, so whether they pay is not tried here, unmeasured."""
    warm = [
        Submit(f"warm-{prompt.key}", prompt.tokens, 24, stop_tokens=prompt.stop_tokens)
        for prompt in encode_prompts(OWN_PROMPTS[:2], target)
    ]
    measure_decoding(build_loop(target, options, None), warm, ModeRun("plain"))
    fixed = [msgspec.structs.replace(submit, depth=min(_WARM_DEPTH, options.max_depth)) for submit in warm]
    measure_decoding(build_loop(target, options, drafter), fixed, ModeRun("spec"))


def environment_of(target: LoadedSource, options: EngineOptions) -> dict[str, Any]:
    """Return what a result was measured with: versions, machine and loaded target."""
    caps = target.model.capabilities
    return {
        "outrider": version("outrider"),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "model": target.name,
        "adapter": options.model.adapter,
        "device": caps.device,
        "weights": caps.weights,
        "activations": caps.activations.value,
        "kv_cache": caps.kv_cache.value,
        "exactness": caps.exactness.value,
        "row_invariant": target.row_invariant,
    }


@dataclass(frozen=True, slots=True)
class RecommendJob:
    """What to compare on what. `prompts` None: those of our own. `limit` 0: all of them. `replica`: the item of
    `model.replicas` to compare for, None where they have the same drafts."""

    config: ClusterConfig
    base: Path
    stores: tuple[Path, ...] = ()
    models: tuple[str, ...] = ()
    prompts: Path | None = None
    limit: int = 0
    max_tokens: int = 96
    replica: int | None = None


@dataclass(slots=True)
class _Loaded:
    """The candidates that could be loaded beside one target, each a way to decode, and why the others could not."""

    config: ClusterConfig
    base: Path
    target: LoadedSource
    tell: Tell
    ways: list[Way]
    candidates: dict[str, Candidate] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def load_all(self, job: RecommendJob) -> None:
        """Load every draft alone, then the chains of those that can be loaded."""
        try:
            for candidate in list_candidates(self.config, job.stores, job.models):
                self._load(candidate)
            for candidate in chain_candidates(self.config, list(self.candidates.values())):
                self._load(candidate)
        except BaseException:
            close_drafters(self.ways)
            raise

    def _load(self, candidate: Candidate) -> None:
        name, tell = candidate.name, self.tell
        tell(f"loading {name}", -1.0)
        try:
            options = _build_options(self.config, self.base, candidate.drafts)
            drafter = build_drafter(options, self.target, lambda stage, _: tell(f"loading {name}: {stage}", -1.0))
        except (AdapterError, OutriderError) as error:
            self.refused[name] = _without_place(str(error))
            return
        way = Way(name, options, drafter)
        if reason := _list_failed([way]).get(name):
            self.refused[name] = reason
            close_drafters([way])
            return
        self.ways.append(way)
        self.candidates[name] = candidate


def recommend_drafts(job: RecommendJob, tell: Tell) -> dict[str, Any]:
    """Return `summary`, `candidates`, `categories`, `environment` and `formulas`. Raises MeasurementError where
    there is nothing to compare, or the prompts cannot be read; AdapterError where the target cannot be loaded."""
    if not job.config.speculation.depth:
        raise MeasurementError(
            "speculation.method: the configuration switches speculation off: there is nothing to compare"
        )
    config = choose_replica(leave_out_canary(job.config), job.replica)
    plain = _build_options(config, job.base, ())
    target = load_target(plain, lambda stage, _: tell(f"the target: {stage}", -1.0))
    try:
        prompts = _read(job, target)
        loaded = _Loaded(config, job.base, target, tell, [Way(NONE, plain), Way(CONTROL, plain)])
        loaded.load_all(job)
        try:
            runs = _decode(target, loaded.ways, prompts, job.max_tokens, tell)
            failed = _list_failed(loaded.ways)
        finally:
            close_drafters(loaded.ways)
        environment = environment_of(target, plain) | {"max_tokens": job.max_tokens, "prompts": len(prompts)}
    finally:
        target.model.close()
    loaded.refused |= failed
    return _build_result(loaded, prompts, runs) | {"environment": environment, "formulas": FORMULAS}


def _read(job: RecommendJob, target: LoadedSource) -> list[Prompt]:
    if job.prompts is not None:
        return read_prompts(job.prompts, target, job.limit)
    return encode_prompts(OWN_PROMPTS[: job.limit or len(OWN_PROMPTS)], target)


def _build_options(config: ClusterConfig, base: Path, drafts: Sequence[AnyDraft]) -> EngineOptions:
    """Return a worker's options with these drafts. No way may find another's prefill done."""
    options = engine_options(config.model_copy(update={"drafts": list(drafts)}), base)
    return msgspec.structs.replace(options, prefix_reuse=False, max_running=1)


def _without_place(reason: str) -> str:
    """Return a reason without the place in cluster.yaml that it begins with: the draft is not written there yet."""
    place, colon, rest = reason.partition(": ")
    return rest if colon and place.startswith("drafts[") else reason


def _list_failed(ways: Sequence[Way]) -> dict[str, str]:
    states = {way.name: way.drafter.states() for way in ways if way.drafter is not None}
    return {
        name: "; ".join(f"{state.name} failed: {state.reason}" for state in drafters if state.state == "failed")
        for name, drafters in states.items()
        if any(state.state == "failed" for state in drafters)
    }


def _decode(
    target: LoadedSource, ways: Sequence[Way], prompts: Sequence[Prompt], max_tokens: int, tell: Tell
) -> dict[str, ModeRun]:
    for number, way in enumerate(ways):
        tell("warming up", number / len(ways))
        warm_up(target, way.options, way.drafter)
    submits = [
        Submit(f"{number}-{prompt.key}", prompt.tokens, max_tokens, stop_tokens=prompt.stop_tokens)
        for number, prompt in enumerate(prompts)
    ]
    tell("decoding", 0.0)
    return decode_in_turns(target, ways, submits, lambda done: tell("decoding", done / len(submits)))


def _build_result(loaded: _Loaded, prompts: Sequence[Prompt], runs: dict[str, ModeRun]) -> dict[str, Any]:
    by_way = {name: list(run.records.values()) for name, run in runs.items()}
    ways = {name: describe_way(by_way[NONE], records) for name, records in by_way.items()}
    usable = {name: way for name, way in ways.items() if name not in loaded.refused}
    chosen = choose_drafts(usable)
    drafts = loaded.candidates[chosen["name"]].to_items() if chosen["name"] != NONE else []
    rows: list[dict[str, Any]] = [{"name": name, "failed": "", **way} for name, way in usable.items()]
    rows += [{"name": name, "failed": reason} for name, reason in loaded.refused.items()]
    categories = describe_categories(prompts, by_way)
    shares = [row["router_share"] for row in categories if row["router_share"] is not None]
    of_plain = [row["chain_vs_plain"] for row in categories if row["chain_vs_plain"] is not None]
    return {
        "summary": {
            "identical": all(way["identical"] for way in ways.values()),
            "recommended": chosen["name"],
            **{name: chosen[name] for name in ("speed_up", "interval", "alike")},
            "drafts": drafts,
            "yaml": format_drafts(drafts),
            **compare_chain(ways),
            "worst_router_share": min(shares, default=None),
            "control_speed_up": ways[CONTROL]["speed_up"],
            "control_interval": ways[CONTROL]["interval"],
            "worst_chain_vs_plain": min(of_plain, default=None),
        },
        "candidates": rows,
        "categories": categories,
    }
