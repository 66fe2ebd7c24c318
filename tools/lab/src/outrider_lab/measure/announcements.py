"""Memory as announced beside memory as used, by runtime, model and slots:

    python -m outrider_lab.measure.announcements [--model NAME=FILE ...] [--adapter RUNTIME ...] [--report FILE]
        [--json FILE] [--slots 1 16] [--kv-cache-mib 64] [--device CPU] [--loads 2]

It prints a table for docs/, and ends with 1 where the bars are not held (`_MOST_OFF`, `_MEDIAN_OFF`). Without a model
it measures the default one. `--json` keeps the cases, and goes on behind those that the file has.

Each case is a process of its own. It prepares the model, loads it as a target's worker does, and runs the largest
forwards that are announced for it (adapters/conformance/largest_forwards.py). `used` is the most that the process held
(VmHWM): pages of mapped files are in it as soon as they were touched. A case whose model had to be prepared runs again,
and each runs once more by what was kept of its first load (`corrected`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import psutil

from adapters.conformance.largest_forwards import run_largest_forwards
from adapters.model_source import resolve
from adapters.model_store import ModelStore
from adapters.names import CONVERTING_ADAPTERS, GGUF_ADAPTERS
from adapters.parent_process import end_with_parent
from device_profiles.units import MIB, human_bytes
from orchestrator.daemon.systemd.files import DEFAULT_MODEL
from orchestrator.machine.process_memory import peak_rss_bytes
from orchestrator.protocol.load_options import EngineOptions, ModelOptions
from orchestrator.worker.engine.batch import count_logits_rows
from orchestrator.worker.loading.engine import sum_planned_bytes
from orchestrator.worker.loading.models import load_target

# Of a forward, as `limits.max_batch_rows` has them by default.
_BATCH_ROWS: Final = 1024
_ADAPTERS: Final = (*GGUF_ADAPTERS, *CONVERTING_ADAPTERS)
# How far announcements may be from what is used at most and at the median, as shares of that.
_MOST_OFF: Final = 0.15
_MEDIAN_OFF: Final = 0.07


@dataclass(frozen=True, slots=True)
class Announced:
    """A case, in bytes: what its worker was announced to hold by part, held when it was loaded, and held at most.
    `load` is the machine's mean load of the last minute when it ended."""

    adapter: str
    model: str
    slots: int
    corrected: bool
    parts: dict[str, int]
    planned: int
    loaded: int
    used: int
    load: float

    @property
    def error(self) -> float:
        """How far the announcement was above what was used, as a share of that; below 0 where it was too little."""
        return self.planned / self.used - 1.0 if self.planned and self.used else 1.0


def build_options(
    source: Path, store: Path, adapter: str, *, device: str, slots: int, kv_cache_bytes: int
) -> EngineOptions:
    """Return what a worker loads such a target by, without drafts."""
    model = ModelOptions(
        source=str(source),
        base=str(Path.cwd()),
        store=str(store),
        name="",
        adapter=adapter,
        device=device,
        exactness="bit",
        weights="as_file",
        activations="auto",
        kv_cache_precision="auto",
        threads=0,
        kv_cache_bytes=kv_cache_bytes,
        max_batch_rows=_BATCH_ROWS,
    )
    settings = {
        "max_running": slots,
        "max_itl_ms": 200.0,
        "prefix_reuse": True,
        "max_depth": 0,
        "tolerance": {"acceptance_rate": 0.9, "warmup_tokens": 100, "max_delta": 2.0},
        "low_acceptance_rate": 0.0,
        "drafters": [],
    }
    return msgspec.convert({"model": msgspec.to_builtins(model), **settings}, EngineOptions)


def measure_here(options: EngineOptions) -> dict[str, Any] | None:
    """Return what this process was announced to hold and held, None where it prepared the model: that takes memory of
    its own. Raises what adapters raise."""
    store = ModelStore(Path(options.model.store))
    before = store.all()
    target = load_target(options, lambda stage, fraction: None)
    if store.all() != before:
        return None
    loaded = psutil.Process().memory_info().rss
    caps = target.model.capabilities
    logits_rows = count_logits_rows(caps.max_batch_rows, caps.slots, options.deepest)
    widths = run_largest_forwards(target.model, logits_rows)
    used, corrected = peak_rss_bytes(), False
    if target.meter is not None:
        corrected = target.meter.last is not None
        for rows in widths:
            target.meter.observe_forward(rows, min(rows, logits_rows), caps.slots)
        target.meter.save_held(used)
    return {
        "slots": options.max_running,
        "corrected": corrected,
        "parts": target.plan.parts if target.plan else {},
        "planned": sum_planned_bytes(target, options, []),
        "loaded": loaded,
        "used": used,
    }


def measure_case(options: EngineOptions, model: str) -> Announced | str:
    """Return the figures of a case, measured in a process of its own, or why there are none."""
    settings = msgspec.json.encode(options).decode()
    command = [sys.executable, "-m", "outrider_lab.measure.announcements", "--one", settings]
    while True:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            preexec_fn=end_with_parent,
        )
        if done.returncode:
            return done.stderr.decode(errors="replace").strip().splitlines()[-1]
        if (case := json.loads(done.stdout.splitlines()[-1])) is not None:
            return Announced(options.model.adapter, model, **case, load=os.getloadavg()[0])


def format_case(case: Announced) -> str:
    """Return a line of a table for people."""
    parts = ", ".join(f"{part} {human_bytes(size)}" for part, size in case.parts.items())
    how = ", corrected" if case.corrected else ""
    return (
        f"{case.adapter:15} {case.model:6} {case.slots:3} slots{how}: planned {human_bytes(case.planned)}, used "
        f"{human_bytes(case.used)} ({case.error:+.1%}), {human_bytes(case.loaded)} when loaded; {parts}; "
        f"load {case.load:.1f}"
    )


def format_table(cases: Sequence[Announced]) -> list[str]:
    """Return a table of Markdown in MiB: a row for each runtime, model and slots, with its first load and its last."""
    lines = [
        "| runtime | model | slots | announced | used | off | by the last load | used | off |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows: dict[tuple[str, str, int], list[Announced]] = {}
    for case in cases:
        rows.setdefault((case.adapter, case.model, case.slots), []).append(case)
    for (adapter, model, slots), loads in rows.items():
        first = next((case for case in loads if not case.corrected), None)
        last = next((case for case in reversed(loads) if case.corrected), None)
        cells = "".join(map(_format_cells, (first, last)))
        lines.append(f"| `{adapter}` | {model} | {slots} |{cells}")
    return lines


def _format_cells(case: Announced | None) -> str:
    if case is None:
        return " | | |"
    return f" {case.planned / MIB:,.0f} | {case.used / MIB:,.0f} | {case.error:+.1%} |"


def judge_cases(cases: Sequence[Announced]) -> list[tuple[str, bool]]:
    """Return a line on the first loads and one on those behind, each with whether the bars are held."""
    lines = []
    for corrected, how in ((False, "before any load"), (True, "by the load before")):
        errors = [abs(case.error) for case in cases if case.corrected == corrected]
        if errors:
            held = max(errors) <= _MOST_OFF and median(errors) <= _MEDIAN_OFF
            line = f"{len(errors)} cases announced {how}: at most {max(errors):.1%} off, median {median(errors):.1%}"
            bars = f"(bars {_MOST_OFF:.0%} and {_MEDIAN_OFF:.0%}: {'held' if held else 'NOT held'})"
            lines.append((f"{line} {bars}", held))
    return lines


def _read_cases(file: Path | None) -> list[Announced]:
    if file is None or not file.exists():
        return []
    return msgspec.json.decode(file.read_bytes(), type=list[Announced])


def main() -> None:
    """Measure every case, and write and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--model", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--adapter", action="append", default=[])
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--kv-cache-mib", type=int, default=64)
    parser.add_argument("--loads", type=int, default=2, help="of each case; all but the first go by those before")
    parser.add_argument("--store", type=Path, default=Path("store"))
    parser.add_argument("--report", type=Path, help="the table as a file")
    parser.add_argument("--json", type=Path, help="the cases as a file")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure_here(msgspec.json.decode(arguments.one, type=EngineOptions))))
        return
    cases, failed = _read_cases(arguments.json), 0
    named = arguments.model or [f"default={resolve(DEFAULT_MODEL, Path()).path}"]
    models = [model.partition("=") for model in named]
    wanted = product(arguments.adapter or _ADAPTERS, models, arguments.slots, range(arguments.loads))
    for adapter, (name, _, file), slots, _ in wanted:
        sizes = {"slots": slots, "kv_cache_bytes": arguments.kv_cache_mib * MIB}
        options = build_options(Path(file), arguments.store, adapter, device=arguments.device, **sizes)
        case = measure_case(options, name)
        if isinstance(case, str):
            failed += 1
            print(f"{adapter} {name}: {case}", flush=True)
            continue
        cases.append(case)
        print(format_case(case), flush=True)
        if arguments.json:
            arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(cases), indent=1))
    verdicts = judge_cases(cases)
    report = "\n".join([*format_table(cases), "", *(line for line, _ in verdicts)])
    print(f"\n{report}")
    if arguments.report:
        arguments.report.write_text(f"{report}\n", encoding="utf-8")
    sys.exit(1 if failed or not all(held for _, held in verdicts) else 0)


if __name__ == "__main__":
    main()
