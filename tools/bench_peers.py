"""Outrider beside openvino_genai and onnxruntime_genai on the same model and prompts, in turn, in one process.

    python tools/bench_peers.py --prompts FILE [--limit P] [--max-tokens N] [--adapter NAME]
                                [--onnx-genai NAME=DIR]... [--json OUT]

`--onnx-genai` adds a model that `python -m onnxruntime_genai.models.builder -p int4 -e cpu` wrote to DIR (that
library is installed by hand; building needs torch and transformers, running does not).

Every prompt is decoded greedily by each engine before the next prompt, so that a drift of the machine meets all
of them. Outrider's modes run the decode loop in this process, as `outrider bench decode` does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino as ov
import openvino_genai
from rich.console import Console
from rich.progress import track
from rich.table import Table

from adapters import registry
from adapters.model_source import resolve
from orchestrator.bench.decode import read_prompts
from orchestrator.bench.record import ModeRun, Prompt, Record, measure_decoding
from orchestrator.config.load import load_config
from orchestrator.loading.drafters import build_drafter
from orchestrator.loading.engine import build_loop
from orchestrator.loading.models import LoadedTarget, load_target
from orchestrator.loading.options import engine_options
from orchestrator.workers.messages import Submit

FORMULAS = {
    "tok_s": "generated tokens / sum of latencies (prefill included)",
    "tpot_ms": "sum(latency - TTFT) / sum(n - 1)",
    "ttft_ms": "mean time to the first token",
}
Generate = Callable[[Prompt], Record]


def genai(directory: Path, max_tokens: int, *, prompt_lookup: bool) -> Generate:
    """Return openvino_genai's pipeline over the IR in `directory`; its own TTFT, our clock for the latency."""
    extra: dict[str, Any] = {"prompt_lookup": True} if prompt_lookup else {}
    pipe = openvino_genai.LLMPipeline(str(directory), "CPU", **extra)
    config = openvino_genai.GenerationConfig(max_new_tokens=max_tokens)
    if prompt_lookup:
        config.num_assistant_tokens, config.max_ngram_size = 4, 3

    def generate(prompt: Prompt) -> Record:
        config.stop_token_ids = set(prompt.stop_tokens)
        ids = ov.Tensor(np.array([prompt.tokens], dtype=np.int64))
        started = time.perf_counter()
        result = pipe.generate(ids, config)
        latency_s = time.perf_counter() - started
        first_s = result.perf_metrics.get_ttft().mean / 1000.0
        return Record([int(token) for token in result.tokens[0]], first_s, latency_s)

    return generate


def onnx_genai(directory: Path, max_tokens: int) -> Generate:
    """Return onnxruntime_genai's generator over a model built by its builder; our clock for both times."""
    import onnxruntime_genai

    model = onnxruntime_genai.Model(str(directory))

    def generate(prompt: Prompt) -> Record:
        settings = onnxruntime_genai.GeneratorParams(model)
        settings.set_search_options(max_length=len(prompt.tokens) + max_tokens, do_sample=False)
        stop = set(prompt.stop_tokens)
        tokens: list[int] = []
        started = time.perf_counter()
        generator = onnxruntime_genai.Generator(model, settings)
        generator.append_tokens(np.array([prompt.tokens], dtype=np.int32))
        first_s = 0.0
        while len(tokens) < max_tokens and not (tokens and tokens[-1] in stop):
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
            first_s = first_s or time.perf_counter() - started
        return Record(tokens, first_s, time.perf_counter() - started)

    return generate


def outrider(target: LoadedTarget, options: Any, max_tokens: int, *, speculate: bool) -> Generate:
    """Return Outrider's loop, one over all prompts as in a server; with `speculate` it has drafters."""
    loop = build_loop(target, options, build_drafter(options, target) if speculate else None)

    def generate(prompt: Prompt) -> Record:
        outcome = ModeRun("spec" if speculate else "plain")
        submit = Submit(prompt.key, prompt.tokens, max_tokens, stop_tokens=prompt.stop_tokens)
        measure_decoding(loop, [submit], outcome)
        return outcome.records[prompt.key]

    return generate


def summarise(records: Sequence[Record]) -> dict[str, float]:
    """Return one engine's figures."""
    steps = sum(max(0, len(record.tokens) - 1) for record in records)
    return {
        "tok_s": sum(len(record.tokens) for record in records) / sum(record.last_s for record in records),
        "tpot_ms": sum(record.last_s - record.first_s for record in records) * 1000.0 / max(1, steps),
        "ttft_ms": sum(record.first_s for record in records) * 1000.0 / len(records),
        "tokens": sum(len(record.tokens) for record in records),
    }


def run(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Load every engine, decode every prompt with each, return the result."""
    config = load_config(arguments.config)
    options = engine_options(config, arguments.config.resolve().parent)
    options = msgspec.structs.replace(options, prefix_reuse=False)
    options = options.with_model(adapter=arguments.adapter or options.model.adapter)
    source = work / "model.gguf"
    source.symlink_to(resolve(config.model.source, arguments.config.parent).path.resolve())
    console = Console(stderr=True)
    with console.status("loading the engines"):
        openvino_genai.LLMPipeline(str(source), "CPU", enable_save_ov_model=True)
        targets = {
            kind: load_target(options.with_model(exactness=kind), lambda stage, fraction: None)
            for kind in ("bit", "kernel")
        }
        engines: dict[str, Generate] = {
            "openvino_genai": genai(work, arguments.max_tokens, prompt_lookup=False),
            "openvino_genai prompt lookup": genai(work, arguments.max_tokens, prompt_lookup=True),
            "outrider plain, kernel": outrider(targets["kernel"], options, arguments.max_tokens, speculate=False),
            "outrider plain, bit": outrider(targets["bit"], options, arguments.max_tokens, speculate=False),
            "outrider speculative, bit": outrider(targets["bit"], options, arguments.max_tokens, speculate=True),
            "outrider speculative, kernel": outrider(targets["kernel"], options, arguments.max_tokens, speculate=True),
        }
        for name, directory in arguments.onnx_genai:
            engines[name] = onnx_genai(Path(directory), arguments.max_tokens)
    prompts = read_prompts(arguments.prompts, targets["bit"], arguments.limit)
    for engine in engines.values():  # warm: first shapes are compiled outside the measurement
        engine(Prompt("warm", "", prompts[0].tokens[:64], prompts[0].stop_tokens))
    records: dict[str, list[Record]] = {name: [] for name in engines}
    for number, prompt in enumerate(track(prompts, "decoding", console=console, transient=True)):
        names = list(engines)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            records[name].append(engines[name](prompt))
    rows = {name: summarise(found) for name, found in records.items()}
    summary = _ratios(rows) | _onnx_ratios(rows, [name for name, _ in arguments.onnx_genai])
    return {
        "adapter": options.model.adapter,
        "summary": summary,
        "runs": rows,
        "formulas": FORMULAS,
        "prompts": len(prompts),
    }


def _ratios(rows: dict[str, dict[str, float]]) -> dict[str, float]:
    plain, lookup = rows["openvino_genai"], rows["openvino_genai prompt lookup"]
    spec = rows["outrider speculative, bit"]
    return {
        "kernel_tpot_vs_genai": rows["outrider plain, kernel"]["tpot_ms"] / plain["tpot_ms"],
        "bit_tpot_vs_genai": rows["outrider plain, bit"]["tpot_ms"] / plain["tpot_ms"],
        "spec_tok_s_vs_genai": spec["tok_s"] / plain["tok_s"],
        "spec_tok_s_vs_genai_prompt_lookup": spec["tok_s"] / lookup["tok_s"],
        "spec_tpot_speed_up_vs_genai": plain["tpot_ms"] / spec["tpot_ms"],
        "spec_tpot_speed_up_vs_own_bit_plain": rows["outrider plain, bit"]["tpot_ms"] / spec["tpot_ms"],
    }


def _onnx_ratios(rows: dict[str, dict[str, float]], peers: Sequence[str]) -> dict[str, float]:
    return {
        f"{kind}_tpot_vs_{peer}": rows[f"outrider {mode}"]["tpot_ms"] / rows[peer]["tpot_ms"]
        for peer in peers
        for kind, mode in (("kernel", "plain, kernel"), ("bit", "plain, bit"), ("spec", "speculative, bit"))
    }


def _parse_named_directory(text: str) -> tuple[str, str]:
    name, _, directory = text.partition("=")
    if not name or not Path(directory).is_dir():
        raise argparse.ArgumentTypeError(f"write NAME=DIR with a directory that is there, not {text!r}")
    return name, directory


def main() -> None:
    """Parse arguments, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--adapter", choices=registry.names(), help="Outrider's runtime; else as configured")
    parser.add_argument("--onnx-genai", type=_parse_named_directory, action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--config", type=Path, default=Path("cluster.yaml"))
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        result = run(arguments, Path(work))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    table = Table(
        title=f"{result['adapter']}: {result['prompts']} prompts, {arguments.max_tokens} tokens, greedy, one at a time"
    )
    for name in ("engine", "tok/s", "TPOT ms", "TTFT ms"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    for name, row in result["runs"].items():
        table.add_row(name, f"{row['tok_s']:.1f}", f"{row['tpot_ms']:.2f}", f"{row['ttft_ms']:.0f}")
    console = Console()
    console.print(table)
    for name, value in result["summary"].items():
        console.print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
