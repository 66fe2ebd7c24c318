"""Do two runtimes give the same model? Greedy choices over teacher-forced positions, runtime beside runtime.

    python tools/compare_runtimes.py --prompts FILE [--positions N] [--adapters openvino_rt,onnx_rt]
                                     [--activations fp32] [--reference] [--json OUT]

Both runtimes load the file that cluster.yaml names. The first one answers the prompts greedily, and all choose again
at every position of the answers. `--reference` adds transformers in float32 over the same file (needs torch,
transformers and accelerate), once with the file's own values and once with those that the runtimes hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from adapters import registry
from adapters.contract import LoadedModel, Segment
from adapters.model_source import resolve
from orchestrator.config.load import load_config
from orchestrator.loading.models import load_target
from orchestrator.loading.options import engine_options
from orchestrator.recommend.decode import read_prompts

Rows = NDArray[np.float32]
ANSWER_TOKENS = 64
Text = tuple[int, list[int]]
"""Where the answer's first position is, and all tokens."""


def load_logits(name: str, arguments: argparse.Namespace, texts: list[Text]) -> list[Rows]:
    """Return a runtime's logits over all answers; where there are none yet, it gives them."""
    options = engine_options(load_config(arguments.config), arguments.config.resolve().parent)
    options = options.with_model(adapter=name, activations=arguments.activations)
    target = load_target(options, lambda stage, fraction: None)
    if not texts:
        prompts = read_prompts(arguments.prompts, target, -(-arguments.positions // ANSWER_TOKENS))
        texts.extend(answer_prompt(target.model, prompt.tokens) for prompt in prompts)
    rows = []
    for begin, tokens in texts:
        rows.append(feed_tokens(target.model, tokens, begin))
        target.model.release(0)
    target.model.close()
    return rows


def answer_prompt(model: LoadedModel, prompt: Sequence[int]) -> Text:
    """Continue a prompt greedily."""
    text = list(prompt)
    for _ in range(ANSWER_TOKENS):
        text.append(int(feed_tokens(model, text, len(text) - 1)[-1].argmax()))
    model.release(0)
    return len(prompt) - 1, text[:-1]


def feed_tokens(model: LoadedModel, text: list[int], begin: int) -> Rows:
    """Return the rows from position `begin` on, feeding what slot 0 does not hold yet."""
    chunk, rows = model.capabilities.max_batch_rows, []
    for start in range(model.count_cached_positions(0), len(text), chunk):
        tokens = text[start : start + chunk]
        wanted = (min(max(begin - start, 0), len(tokens)), len(tokens))
        rows.append(model.forward([Segment(0, start, tokens, wanted)]).logits.copy())
    return np.concatenate(rows)


def reference(path: Path, texts: Sequence[Text], *, ours: bool) -> list[Rows]:
    """Return transformers' logits in float32; with `ours`, over the values that the runtimes hold."""
    from tests.support.reference import Reference

    model = Reference(path, ours=ours)
    return [model.logits(tokens)[begin:] for begin, tokens in texts]


def compare(first: Sequence[Rows], second: Sequence[Rows]) -> dict[str, float]:
    """Return agreement of choices, and the mean distance of logits in units of their spread."""
    one, two = np.concatenate(list(first)), np.concatenate(list(second))
    return {
        "positions": len(one),
        "agreement": float((one.argmax(axis=1) == two.argmax(axis=1)).mean()),
        "mean_difference_of_spread": float(np.abs(one - two).mean() / one.std()),
    }


def main() -> None:
    """Parse arguments, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--positions", type=int, default=1000)
    parser.add_argument("--adapters", default="openvino_rt,onnx_rt")
    parser.add_argument("--activations", default="auto", choices=("auto", "fp32"))
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--config", type=Path, default=Path("cluster.yaml"))
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    names = arguments.adapters.split(",")
    if unknown := set(names) - set(registry.names()):
        parser.error(f"no adapter is called {', '.join(sorted(unknown))}")
    texts: list[Text] = []
    found = {name: load_logits(name, arguments, texts) for name in names}
    if arguments.reference:
        config = load_config(arguments.config)
        path = resolve(config.model.source, arguments.config.parent).path
        found["fp32, the file's values"] = reference(path, texts, ours=False)
        found["fp32, the runtimes' values"] = reference(path, texts, ours=True)
    result, lines = [], []
    for one, two in itertools.combinations(found, 2):
        figures = compare(found[one], found[two])
        result.append({"first": one, "second": two, **figures})
        lines.append((one, two, f"{figures['agreement']:.2%}", f"{figures['mean_difference_of_spread']:.4f}"))
    table = Table(title=f"{result[0]['positions']} teacher-forced positions of {len(texts)} answers")
    for column in ("", "", "same choice", "mean |difference| / spread"):
        table.add_column(column)
    for line in lines:
        table.add_row(*line)
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
