"""Every draft on every target that this machine can run, each against target-only decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import typer

from adapters import registry
from adapters.contract import AdapterError, silent
from adapters.model_source import refuse_runtime
from device_profiles.units import MIB
from orchestrator.errors import OutriderError
from orchestrator.plain_table import print_lines
from orchestrator.protocol.load_options import (
    DraftOptions,
    EngineOptions,
    ModelDraftOptions,
    ModelOptions,
    SuffixOptions,
)
from orchestrator.recommend.record import Prompt
from orchestrator.recommend.run import encode_prompts, read_prompts, warm_up
from orchestrator.worker.drafting.port import Drafter
from orchestrator.worker.loading.drafters import build_drafter
from orchestrator.worker.loading.models import LoadedSource, load_target
from orchestrator.worker.measuring.prompts import OWN_PROMPTS
from outrider_lab.bench.decode import measure_modes
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.result import print_formulas, print_rows
from outrider_lab.bench.selection import read_configured, select_by_name
from outrider_lab.bench.summary import FORMULAS
from policies.sampling import Sampling

EXACT = {"greedy": Sampling(), "sampled": Sampling(0.8, top_p=0.95, seed=1)}
"""What is decoded to the target's own tokens."""
REJECTION = dataclasses.replace(EXACT["sampled"], acceptance="rejection")
"""Whose tokens depend on the drafts: nothing is compared, the acceptance is what is looked at."""
_SUFFIX = SuffixOptions("suffix", max_match=16, memory_bytes=16 * MIB)
_DRAFT_KV_BYTES = 256 * MIB


def measure_pairs(
    options: EngineOptions, only: str, prompts: Path | None, limit: int, max_tokens: int, depth: int | None
) -> dict[str, Any]:
    """Return the whole result of the pairings whose name `only` finds (`summary`, `runs`, `skipped`, `environment`,
    `formulas`), and say meanwhile what has been measured. Raises BenchError."""
    chosen, skipped = pairings(options)
    chosen = select_by_name(only, chosen)
    found = []
    for row in _measure_pairings(chosen, options, lambda target: _prompts(prompts, target, limit), max_tokens, depth):
        found.append(row)
        typer.echo(f"{len(found)} of {len(chosen)}: {row['pair']}", err=True)
    return {
        "summary": summarise_pairs(found),
        "runs": found,
        "skipped": skipped,
        "environment": {
            "max_tokens": max_tokens,
            "depth": "policy" if depth is None else depth,
            "model": options.model.source,
            "exactness": options.model.exactness,
        },
        "formulas": {
            name: FORMULAS[name] for name in ("acceptance_rate", "mean_acceptance_length", "tpot_ms", "control_ratio")
        }
        | {
            "coupled_acceptance": "accepted / drafted tokens of the sampled runs, pairs with one draft model",
            "rejection_acceptance": "the same of runs under rejection sampling, whose output is not compared",
            "draft_rounds": "rounds in which a draft model was asked, trials included; draft_ms is what they took",
            "rss_mib": "growth of this process's resident memory as the draft is loaded; what was there is shared",
        },
    }


@dataclass(frozen=True, slots=True)
class Pairing:
    """A target and the drafters for it."""

    target: ModelOptions
    drafters: tuple[DraftOptions, ...]

    @property
    def lone_model(self) -> bool:
        """True where one draft model drafts, alone."""
        return len(self.drafters) == 1 and isinstance(self.drafters[0], ModelDraftOptions)

    @property
    def name(self) -> str:
        """The drafters, in order, and the target: "suffix + onnx_rt CPU -> openvino_rt CPU"."""
        return f"{' + '.join(draft.name for draft in self.drafters)} -> {_where(self.target)}"


def pairings(options: EngineOptions) -> tuple[list[Pairing], list[str]]:
    """Return every pairing of the configured model with itself and the configured draft models over all runtimes and
    devices here, and why the others are left out."""
    runtimes, skipped = list_model_places(options.model)
    models = [_draft_of(place, options) for place in runtimes]
    for draft in options.drafters:
        if isinstance(draft, ModelDraftOptions) and draft.model.source != options.model.source:
            name = f"{Path(draft.model.source).name} on {_where(draft.model)}"
            models.append(msgspec.structs.replace(draft, name=name))
    sets: list[tuple[DraftOptions, ...]] = [(_SUFFIX,), *((draft,) for draft in models)]
    sets += [(_SUFFIX, draft) for draft in models]
    return [Pairing(target, drafters) for target in runtimes for drafters in sets], skipped


def list_model_places(model: ModelOptions) -> tuple[list[ModelOptions], list[str]]:
    """Return the model on each runtime and device that is here, and why the others are left out."""
    if model.adapter == "simulated":
        return [model], []
    found: list[ModelOptions] = []
    skipped: list[str] = []
    for name in registry.names():
        if name == "simulated":
            continue
        try:
            refuse_runtime(model.source, Path(model.base), name)
            devices = registry.list_devices(name)
        except AdapterError as error:
            skipped.append(f"{name}: {error}")
            continue
        for device in devices:
            for static in (False, True) if name in registry.static_names() else (False,):
                found.append(_at(model, name, device.name, static=static))
    return found, skipped


def _at(model: ModelOptions, adapter: str, device: str, *, static: bool) -> ModelOptions:
    """Return the model elsewhere; where it is configured to be, as it is configured."""
    if (adapter, device, static) == (model.adapter, model.device, model.static.on):
        return model
    return msgspec.structs.replace(
        model, adapter=adapter, device=device, activations="auto", static=dataclasses.replace(model.static, on=static)
    )


def _measure_pairings(
    chosen: Sequence[Pairing],
    options: EngineOptions,
    read: Callable[[LoadedSource], list[Prompt]],
    max_tokens: int,
    depth: int | None,
) -> Iterator[dict[str, Any]]:
    """Measure the pairings, each target loaded once. What cannot be run is told as such."""
    loaded: LoadedSource | None = None
    target: ModelOptions | None = None
    reason = ""
    for pair in chosen:
        if pair.target != target:
            if loaded is not None:
                loaded.model.close()
            loaded, reason, target = None, "", pair.target
            try:
                loaded = load_target(_options_of(pair, options), silent)
            except AdapterError as error:
                reason = str(error)
        if loaded is None:
            yield _build_failed_row(pair, f"the target cannot be run: {reason}")
        else:
            yield _measure(pair, loaded, _options_of(pair, options), read(loaded), max_tokens, depth)
    if loaded is not None:
        loaded.model.close()


def _measure(
    pair: Pairing,
    target: LoadedSource,
    options: EngineOptions,
    prompts: Sequence[Prompt],
    max_tokens: int,
    depth: int | None,
) -> dict[str, Any]:
    process = psutil.Process()
    before = process.memory_info().rss
    drafter: Drafter | None = None
    try:
        drafter = build_drafter(options, target)
        found: dict[str, Any] = {}
        rejection: dict[str, Any] | None = None
        for name, sampling in EXACT.items():
            found[name] = _run(target, options, drafter, prompts, max_tokens, sampling, depth)
        if pair.lone_model and not _is_translated(drafter):
            rejection = _run(target, options, drafter, prompts, max_tokens, REJECTION, depth)
    except (AdapterError, OutriderError) as error:
        return _build_failed_row(pair, str(error))
    finally:
        rss_mib = (process.memory_info().rss - before) / MIB
        states = drafter.states() if drafter is not None else []
        if drafter is not None:
            drafter.close()
    broken = [f"{state.name} failed: {state.reason}" for state in states if state.state == "failed"]
    return {
        "pair": pair.name,
        "target": _where(pair.target),
        "drafters": [draft.name for draft in pair.drafters],
        "failed": "; ".join(broken),
        "identical": all(figures["identical"] for figures in found.values()),
        "rss_mib": rss_mib,
        "kv_cache_mib": sum(state.memory_bytes for state in states) / MIB,
        "states": msgspec.to_builtins(states),
        "rejection": rejection,
        **found,
    }


def _is_translated(drafter: Drafter | None) -> bool:
    """True where the draft's tokens are not the target's: across vocabularies the rules have nothing to compare."""
    return drafter is not None and any(state.vocabulary == "translated" for state in drafter.states())


def _run(
    target: LoadedSource,
    options: EngineOptions,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    max_tokens: int,
    sampling: Sampling,
    depth: int | None,
) -> dict[str, Any]:
    warm_up(target, options, drafter)
    rounds, draft_ms = _drafting(drafter)
    result = measure_modes(target, options, drafter, prompts, max_tokens, 1, sampling, depth, control=True, warm=False)
    now_rounds, now_ms = _drafting(drafter)
    return _figures(result) | {"draft_rounds": now_rounds - rounds, "draft_ms": now_ms - draft_ms}


def _drafting(drafter: Drafter | None) -> tuple[int, float]:
    """Return in how many rounds the draft models were asked so far, and what that took, in ms."""
    models = [state for state in drafter.states() if state.method == "model"] if drafter is not None else []
    return sum(state.rounds for state in models), sum(state.draft_ms for state in models)


def _figures(result: dict[str, Any]) -> dict[str, Any]:
    kept = ("identical", "mismatches", "acceptance_rate", "mean_acceptance_length", "plain_tpot_ms", "spec_tpot_ms")
    requests = result["runs"][1]["requests"]
    return {name: result["summary"][name] for name in (*kept, "tpot_speed_up", "control_ratio", "prompts")} | {
        "drafted": sum(request["drafted"] for request in requests),
        "accepted": sum(request["accepted"] for request in requests),
    }


def _build_failed_row(pair: Pairing, reason: str) -> dict[str, Any]:
    return {
        "pair": pair.name,
        "target": _where(pair.target),
        "drafters": [draft.name for draft in pair.drafters],
        "failed": reason,
        "identical": False,
    }


def summarise_pairs(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return `pairs`, `identical_pairs` (greedy and sampled, no failure), `failed_pairs`, and the acceptance of sampled
    text by both rules, over the pairs with one draft model."""
    lone = [row for row in found if row.get("rejection")]
    return {
        "pairs": len(found),
        "identical_pairs": sum(row["identical"] and not row["failed"] for row in found),
        "failed_pairs": sum(bool(row["failed"]) for row in found),
        "coupled_acceptance": _acceptance([row["sampled"] for row in lone]),
        "rejection_acceptance": _acceptance([row["rejection"] for row in lone]),
    }


def _acceptance(figures: Sequence[dict[str, Any]]) -> float | None:
    drafted = sum(one["drafted"] for one in figures)
    return sum(one["accepted"] for one in figures) / drafted if drafted else None


def read_pairs_options(config: Path | None) -> EngineOptions:
    """Return what the configuration says. Raises BenchError, ConfigError."""
    _, options = read_configured(config)
    if options.max_depth == 0:
        raise BenchError("the configuration switches speculation off: there is nothing to pair")
    return msgspec.structs.replace(options, prefix_reuse=False)


def _options_of(pair: Pairing, options: EngineOptions) -> EngineOptions:
    return msgspec.structs.replace(options, model=pair.target, drafters=list(pair.drafters))


def _prompts(path: Path | None, target: LoadedSource, limit: int) -> list[Prompt]:
    if path is not None:
        return read_prompts(path, target, limit)
    return encode_prompts(OWN_PROMPTS[: limit or len(OWN_PROMPTS)], target)


def _draft_of(place: ModelOptions, options: EngineOptions) -> ModelDraftOptions:
    return ModelDraftOptions(
        name=_where(place),
        place="bench pairs",
        model=msgspec.structs.replace(place, exactness="kernel", kv_cache_bytes=_DRAFT_KV_BYTES),
        prefill_ms=options.max_itl_ms / 2,
    )


def _where(model: ModelOptions) -> str:
    if model.adapter == "simulated":
        return model.adapter
    return f"{model.adapter} {model.device}{' static' if model.static.on else ''}"


_COLUMNS = {
    "pair": "{pair}",
    "sampling": "{sampling}",
    "same": "{same}",
    "acceptance": "{acceptance_rate:.2f}",
    "length": "{mean_acceptance_length:.2f}",
    "plain ms": "{plain_tpot_ms:.2f}",
    "spec ms": "{spec_tpot_ms:.2f}",
    "speed-up": "{tpot_speed_up:.3f}x",
    "control": "{control_ratio:.3f}x",
    "drafted": "{drafted}",
    "rounds": "{draft_rounds}",
    "draft ms": "{draft_ms:.0f}",
    "RSS MiB": "{rss_mib:.0f}",
}


def print_pairs(result: dict[str, Any]) -> None:
    """Print a row for each pair and sampling, what failed, the totals and the formulas."""
    rows = [
        {**row, **row[sampling], "sampling": sampling, "same": _compare(row[sampling], sampling)}
        for row in result["runs"]
        for sampling in ("greedy", "sampled", "rejection")
        if row.get(sampling)
    ]
    print_rows(f"drafts -> target, {result['environment']['model']}", _COLUMNS, rows)
    print_lines(*(f"FAILED {row['pair']}: {row['failed']}" for row in result["runs"] if row["failed"]))
    print_lines(*(f"left out: {reason}" for reason in result["skipped"]))
    print_formulas(result["formulas"])
    print_lines(", ".join(f"{name} {_format_value(value)}" for name, value in result["summary"].items()))


def _compare(figures: dict[str, Any], sampling: str) -> str:
    if sampling == "rejection":
        return "-"
    return "yes" if figures["identical"] else f"NO ({figures['mismatches']})"


def _format_value(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
