"""What a model does under the instruction sets of this process: `python -m tests.support.capped`, a JSON line for each
numerical class.

Environment variables read when a runtime is loaded cap what it finds on the processor, so one process shows one cap.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np

from adapters import registry
from adapters.contract import AdapterError, LoadedModel, LoadOptions, Logits, Precision, Segment
from adapters.hardware import processor
from adapters.invariance import find_variance, fingerprint_bits, probe_text
from adapters.model_source import ModelSource
from adapters.model_store import ModelStore
from adapters.variant import Variant
from device_profiles.numerical_class import ClassFinding, NumericalClass
from orchestrator.config.load import load_config
from orchestrator.fitting.worker_options import engine_options
from orchestrator.protocol.commands import Submit
from orchestrator.worker.loading import numerical_classes
from orchestrator.worker.loading.child_work import OnLook
from orchestrator.worker.loading.models import load_target
from orchestrator.worker.loading.timed_trials import ClassJob, ClassTrial, TrialHere
from policies.sampling import Sampling
from tests.support.loops import decode, loop_over, suffix

SWITCHES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
_KV_BYTES = 96 << 20
_ROWS = 512
_BEHIND = 20
"""Positions of the prompt in front of rows that stand apart."""
_SMALL = 17
"""Rows of a segment up to which every number is compared, and how many rows of logits are wanted of a longer one."""
_LONGEST = {0: 258, 1: 130}
"""Rows of the longest text by the number of threads."""
_LONGEST_ON_TORCH = 130
"""It takes ten times as long, and its kernels change at 64 rows if anywhere (docs/adr/0015-torch.md)."""
_APART = 66
_SINGLES = ((17, 1), (1, 32), (33, 1), (1, 64), (65, 1), (1, 128), (128, 1), (256, 1))
_BESIDE = (1, 2, 3, 5, 8, 17)
_SAMPLINGS = (Sampling(), Sampling(0.8, top_p=0.95, seed=7))
_TOKENS = 16
_SHAPES = ((7, 23), (11, 70))
"""Period and length of the prompts."""
_FLAGS = ("avx", "amx", "bf16", "fp16", "vnni")


@dataclass(frozen=True, slots=True)
class Case:
    """A numerical class of a runtime, on a number of threads (0: the runtime's own choice)."""

    runtime: str
    activations: str
    fixed_width: int = 0
    threads: int = 0

    @classmethod
    def parse(cls, runtime: str, text: str) -> Case:
        """Return the case of "auto" or "fp32", of "bf16/16" for forwards of 16 rows, of "fp32@1" for one thread."""
        text, _, threads = text.partition("@")
        activations, _, width = text.partition("/")
        return cls(runtime, activations, int(width or 0), int(threads or 0))


def load(case: Case, source: Path, store: Path) -> tuple[LoadedModel, bool]:
    """Return the model as the product loads it, and whether its rows were measured to keep their bits."""
    if case.fixed_width:
        return _in_tiles(case, source, store)
    with TemporaryDirectory() as here:
        path = Path(here) / "cluster.yaml"
        path.write_text(
            f"model: {{source: '{source}', adapter: {case.runtime}, activations: {case.activations}}}\n"
            f"store: {{directory: '{store}'}}\ndevices: {{threads: {case.threads}}}\n"
            f"limits: {{kv_cache: {_KV_BYTES >> 20} MiB, max_batch_rows: {_ROWS}}}\ndrafts: []\n"
        )
        with patch.object(numerical_classes, "try_apart", _try_here):
            target = load_target(engine_options(load_config(path), Path(here)), _ignore, slots=8)
    return target.model, target.row_invariant


@dataclass
class _Failed:
    """Implements ClassTrial where nothing came of it."""

    finding: ClassFinding
    needed_bytes: float = 0.0

    def measure_ms(self, rows: int) -> float:
        raise AssertionError(f"{self.finding.numerical_class} did not pass")

    def close(self) -> None:
        """There is nothing to end."""


def _try_here(job: ClassJob, tried: NumericalClass, on_look: OnLook) -> ClassTrial:
    """Try a class in this process, which is under the cap too and has loaded the runtime already. Nobody looks.

    That one thread gives the same bits is not asked: torch would stay at it, and there are cases for it.
    """
    if job.only_bits:
        return _Failed(ClassFinding(tried, True, ""))
    try:
        return TrialHere(registry.get_for(job.adapter, job.options.device, job.options.static), job)
    except AdapterError as error:
        return _Failed(ClassFinding(tried, False, str(error)))


def _in_tiles(case: Case, source: Path, store: Path) -> tuple[LoadedModel, bool]:
    adapter = registry.get(case.runtime)
    prepared = ModelStore(store).prepare(ModelSource(source, source.name, str(source)), Variant(adapter), _ignore)
    options = LoadOptions(
        activations=Precision(case.activations),
        kv_cache_bytes=_KV_BYTES,
        slots=8,
        max_batch_rows=_ROWS,
        threads=case.threads,
    )
    chosen = adapter.classes(options)[-1][0]
    if chosen.fixed_width != case.fixed_width:
        raise SystemExit(f"{case.runtime} has forwards of {chosen.fixed_width} rows, not of {case.fixed_width}")
    model = adapter.load(prepared, replace(options, numerical_class=chosen), _ignore)
    return model, not find_variance(model)


def _ignore(stage: str, fraction: float) -> None:
    """Progress that nobody watches."""


def _longest(case: Case) -> int:
    return min(_LONGEST[case.threads], _LONGEST_ON_TORCH) if case.runtime == "torch_device" else _LONGEST[case.threads]


def widths(limit: int) -> list[int]:
    """Return the numbers of rows that are compared: small ones all, and those around what kernels cut rows into."""
    around = [edge + step for edge in (32, 64, 128, 256) for step in (-1, 0, 1)]
    return [width for width in [*range(1, _SMALL + 1), *around] if width < limit]


def groupings(limit: int) -> Iterator[tuple[int, ...]]:
    """Yield ways to cut a text: equal parts with what is left behind them, and long parts beside one row."""
    for width in widths(limit):
        length = min(limit, max(width + 2, min(2 * _SMALL, 6 * width)))
        parts = [width] * (length // width)
        yield (*parts, length - sum(parts)) if length % width else tuple(parts)
    yield from (parts for parts in _SINGLES if sum(parts) <= limit)


def differing(model: LoadedModel, longest: int) -> list[str]:
    """Return the groupings, up to `longest` rows, in which a row has other bits than in one long segment."""
    caps = model.capabilities
    limit = min(caps.max_context_tokens - _BEHIND, caps.max_batch_rows, longest)
    text = probe_text(model, limit + _BEHIND)
    found = differing_from_one(model, text, limit)
    if caps.apart_tokens:
        found += [f"apart {parts}" for parts in differing_from_one(model, text, min(limit, _APART), start=_BEHIND)]
    return found


def differing_from_one(model: LoadedModel, text: Sequence[int], limit: int, *, start: int = 0) -> list[str]:
    """Return the groupings of one numerical class that differ; with a `start`, of rows apart."""
    reference, _ = run(model, text, [limit], start=start, wanted=limit)
    found = []
    if reference.shape != (limit, model.spec.outputs) or not np.isfinite(reference).all():
        found.append(f"shape {reference.shape}, finite {bool(np.isfinite(reference).all())}")
    for parts in groupings(limit):
        for beside in (False, True) if max(parts) in _BESIDE else (False,):
            rows, places = run(model, text, parts, start=start, beside=beside)
            if not np.array_equal(rows.view(np.uint32), reference[places].view(np.uint32)):
                found.append(f"{parts[:3]} of {sum(parts)}{' beside others' * beside}")
    return found


def run(
    model: LoadedModel,
    text: Sequence[int],
    parts: Sequence[int],
    *,
    start: int = 0,
    beside: bool = False,
    wanted: int = _SMALL,
) -> tuple[Logits, list[int]]:
    """Return the last `wanted` rows of each part of a text from `start` on, and their places behind the start.

    With a `start`, the rows are apart and behind a prompt.
    """
    if start:
        model.forward([Segment(0, 0, text[:start], (0, 0))])
    rows: list[Logits] = []
    places: list[int] = []
    at = start
    for index, count in enumerate(parts):
        first = max(0, count - wanted)
        batch = [Segment(0, at, text[at : at + count], (first, count), apart=start > 0)]
        if beside:
            batch.insert(0, Segment(1, index, text[:1], (0, 0)))
            batch.append(Segment(2, 0, text[: 3 + index % 4], (0, 0)))
        rows.append(model.forward(batch).logits.copy())
        places += range(at - start + first, at - start + count)
        at += count
    for slot in range(3):
        model.release(slot)
    return np.concatenate(rows), places


def unlike(model: LoadedModel) -> tuple[list[str], int]:
    """Return the requests that speculation changes, greedy and seeded, alone and together; and the drafts accepted."""
    requests = [(prompt, sampling) for prompt in _prompts(model) for sampling in _SAMPLINGS]
    submits = [Submit(str(index), prompt, _TOKENS, sampling) for index, (prompt, sampling) in enumerate(requests)]
    expected, _ = decode(loop_over(model, None, running=1, prefix_reuse=False), submits)
    changed, accepted = [], 0
    for running in (1, len(submits)):
        out, rounds = decode(loop_over(model, suffix(), running=running), submits)
        changed += [f"request {key}, {running} at once" for key in out if out[key] != expected[key]]
        accepted += sum(done.accepted for done in rounds)
    return changed, accepted


def _prompts(model: LoadedModel) -> list[list[int]]:
    """Return prompts of unlike lengths that repeat themselves, so that something is drafted."""
    size = model.spec.vocabulary_size
    return [[(13 * i % period * 97 + 5 * period) % size for i in range(length)] for period, length in _SHAPES]


def examine(case: Case, source: Path, store: Path) -> dict[str, Any]:
    """Return what a case comes to; `refused` where the model cannot be run."""
    told = processor()
    found: dict[str, Any] = {
        "processor": told.name,
        "flags": [flag for flag in told.isa if any(part in flag for part in _FLAGS)],
        "cap": {name: os.environ[name] for name in SWITCHES if name in os.environ},
        "runtime": case.runtime,
        "asked": case.activations,
        "threads": case.threads,
    }
    try:
        model, invariant = load(case, source, store)
        caps = model.capabilities
        found |= {
            "class": [caps.activations.value, caps.kv_cache.value, caps.weights, caps.numerical_class.fixed_width],
            "row_invariant": invariant,
            "fingerprint": fingerprint_bits(model),
            "differing": differing(model, _longest(case)) if invariant else [],
        }
        changed, accepted = unlike(model) if invariant and not case.threads else ([], 0)
        model.close()
    except AdapterError as error:
        return found | {"refused": f"{type(error).__name__}: {error}"}
    return found | {"changed": changed, "accepted": accepted}


def main() -> None:
    """Examine the classes that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runtime")
    parser.add_argument("source", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("classes", nargs="+", help="as in bf16/16@1: activations, rows of a tile, threads")
    asked = parser.parse_args()
    for text in asked.classes:
        case = Case.parse(asked.runtime, text)
        sys.stdout.write(json.dumps(examine(case, asked.source, asked.store)) + "\n")


if __name__ == "__main__":
    main()
