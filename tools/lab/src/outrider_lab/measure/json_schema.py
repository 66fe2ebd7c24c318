"""JSON under a schema: is it valid, the same with and without speculation, and how much faster with it.

    python -m outrider_lab.measure.json_schema [--max-tokens N] [--limit P] [--json OUT]

Every request of tools/json_schemas.jsonl (each subject at temperature 0 and 0.8) is decoded without and with
speculation in turn, one at a time, in one process. Exits 1 when an answer is not valid or a single token differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from orchestrator.config.load import load_config
from orchestrator.loading.drafters import build_drafter
from orchestrator.loading.engine import build_loop
from orchestrator.loading.models import LoadedTarget, load_target
from orchestrator.loading.models import load_tokenizer as tokenizer_of
from orchestrator.loading.options import EngineOptions, engine_options
from orchestrator.recommend.record import ModeRun, measure_decoding
from orchestrator.workers.messages import Grammar, Sampling, Submit

FORMULAS = {
    "tok_s": "generated tokens / sum of latencies (prefill included)",
    "tpot_ms": "sum(latency - TTFT) / sum(n - 1)",
    "acceptance_length": "1 + accepted / verification steps",
    "speed_up": "spec tok/s / plain tok/s",
}
SCHEMAS = Path(__file__).with_name("json_schemas.jsonl")


@dataclass(frozen=True, slots=True)
class Case:
    """One request and the schema that its answer must keep to."""

    name: str
    temperature: float
    schema: dict[str, Any]
    submit: Submit


def cases(target: LoadedTarget, max_tokens: int, limit: int) -> list[Case]:
    """Return the requests, of every schema in turn."""
    tokenizer = tokenizer_of(target.tokenizer_dir)
    lines = [json.loads(line) for line in SCHEMAS.read_text(encoding="utf-8").splitlines()]
    found: list[Case] = []
    for place in range(max(len(line["subjects"]) for line in lines)):
        for line in lines:
            text = line["ask"].format(subject=line["subjects"][place])
            prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
            for temperature in (0.0, 0.8):
                submit = Submit(
                    f"{line['name']}-{place}-{temperature}",
                    prompt,
                    max_tokens,
                    Sampling(temperature, seed=place),
                    stop_tokens=sorted(tokenizer.eos_ids),
                    grammar=Grammar("json_schema", json.dumps(line["schema"])),
                )
                found.append(Case(line["name"], temperature, line["schema"], submit))
    return found[:limit] if limit else found


def decode(target: LoadedTarget, options: EngineOptions, asked: Sequence[Case]) -> tuple[ModeRun, ModeRun]:
    """Decode every request without and with speculation, in turn; one drafter over all of them, as in a server."""
    plain, spec = ModeRun("plain"), ModeRun("spec")
    drafter = build_drafter(options, target)
    loops = ((plain, build_loop(target, options, None)), (spec, build_loop(target, options, drafter)))
    warm = msgspec.structs.replace(asked[0].submit, request_id="warm")
    for _, loop in loops:
        measure_decoding(loop, [warm], ModeRun("plain"))
    for number, case in enumerate(track(asked, "decoding", console=Console(stderr=True), transient=True)):
        for outcome, loop in loops if number % 2 else loops[::-1]:
            measure_decoding(loop, [case.submit], outcome)
    return plain, spec


def problem(case: Case, text: str) -> str:
    """Return what is wrong with an answer; "" where it is valid."""
    try:
        jsonschema.validate(json.loads(text), case.schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{case.submit.request_id}: {str(error).splitlines()[0]}: {text}"
    return ""


def summarise(run: ModeRun, asked: Sequence[Case]) -> dict[str, float]:
    """Return a mode's figures over some of the requests."""
    records = [run.records[case.submit.request_id] for case in asked]
    stats = [record.stats for record in records if record.stats is not None]
    tokens = sum(len(record.tokens) for record in records)
    return {
        "tokens": tokens,
        "tok_s": tokens / sum(record.last_s for record in records),
        "tpot_ms": sum(r.last_s - r.first_s for r in records) * 1000.0 / sum(len(r.tokens) - 1 for r in records),
        "acceptance_length": 1.0 + sum(s.accepted for s in stats) / sum(s.steps for s in stats),
    }


def result_of(target: LoadedTarget, asked: Sequence[Case], plain: ModeRun, spec: ModeRun) -> dict[str, Any]:
    """Return all figures, over everything and for each schema and temperature."""
    tokenizer = tokenizer_of(target.tokenizer_dir)
    wrong = [
        found
        for run in (plain, spec)
        for case in asked
        if (found := problem(case, tokenizer.decode(run.records[case.submit.request_id].tokens)))
    ]
    groups = {"all": list(asked)}
    for case in asked:
        groups.setdefault(case.name, []).append(case)
        groups.setdefault(f"temperature {case.temperature}", []).append(case)
    rows = {
        name: {"requests": len(group), "plain": summarise(plain, group), "spec": summarise(spec, group)}
        for name, group in groups.items()
    }
    keys = [case.submit.request_id for case in asked]
    return {
        "requests": len(asked),
        "valid": 2 * len(asked) - len(wrong),
        "of": 2 * len(asked),
        "differ": sum(plain.records[key].tokens != spec.records[key].tokens for key in keys),
        "wrong": wrong,
        "formulas": FORMULAS,
        "groups": rows,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print the figures for people."""
    table = Table(title=f"{result['requests']} requests, one at a time, without and with speculation")
    for name in ("requests", "n", "plain tok/s", "spec tok/s", "speed-up", "tokens a step"):
        table.add_column(name, justify="left" if name == "requests" else "right")
    for name, row in result["groups"].items():
        plain, spec = row["plain"], row["spec"]
        figures = (plain["tok_s"], spec["tok_s"], spec["tok_s"] / plain["tok_s"], spec["acceptance_length"])
        table.add_row(name, str(row["requests"]), *(f"{figure:.2f}" for figure in figures))
    console.print(table)
    for line in result["wrong"]:
        console.print(line, style="red", markup=False)
    console.print(f"valid: {result['valid']} of {result['of']}; outputs that differ: {result['differ']}")


def main() -> int:
    """Run and print; return 0 when everything is valid and nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-tokens", type=int, default=250)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--config", type=Path, default=Path("cluster.yaml"))
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    options = engine_options(load_config(arguments.config), arguments.config.resolve().parent)
    # Both modes decode the same prompts in turn: neither may find the other's prefill done.
    options = msgspec.structs.replace(options, prefix_reuse=False)
    target = load_target(options, lambda stage, fraction: None)
    asked = cases(target, arguments.max_tokens, arguments.limit)
    result = result_of(target, asked, *decode(target, options, asked))
    target.model.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    show(result, Console())
    return 0 if result["valid"] == result["of"] and result["differ"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
