"""`evaluate`: what a draft is worth on prompts that it never saw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from device_profiles.profile import Exactness
from orchestrator.config.drafts import Draft, ModelDraft, SuffixDraft
from orchestrator.config.load import default_config_path, load_config, store_directory
from orchestrator.config.model import ClusterConfig
from orchestrator.fitting.worker_options import engine_options
from orchestrator.generating.data import DataError
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.recommend.run import Way, read_prompts
from orchestrator.worker.loading.drafters import build_drafter
from orchestrator.worker.loading.models import load_target
from outrider_lab.distill.evaluate import ALONE, BOTH, PLAIN, SUFFIX, compare, step_ms


def evaluate(
    draft: Annotated[Path, typer.Option(help="Directory that `export` wrote.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines with `turns` (the first is used) or `prompt`.")],
    limit: Annotated[int, typer.Option(min=0, help="Use this many prompts, spread evenly; 0: all.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 96,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Draft so deep in every round, though it may cost time; else as served.")
    ] = None,
    adapter: Annotated[str, typer.Option(help="The draft's runtime.")] = "onnx_rt",
    exactness: Annotated[Exactness, typer.Option(help="Of the target.")] = Exactness.BIT,
    config: Annotated[Path | None, typer.Option(help="cluster.yaml with the target; else the default places.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the whole result here.")] = None,
) -> None:
    """Decode prompts plainly, with suffix, with suffix and the draft, and with the draft alone; compare them."""
    console = Console(stderr=True)
    path = config or default_config_path()
    read = load_config(path)
    read = read.model_copy(
        update={
            "model": read.model.model_copy(update={"exactness": exactness}),
            # No way may find another's prefill done.
            "limits": read.limits.model_copy(update={"prefix_reuse": False}),
        }
    )
    ways = _ways(read, path.resolve().parent, draft.resolve(), adapter)
    with console.status("loading the target and the draft"):
        target = load_target(ways[PLAIN], lambda _stage, _fraction: None)
        built = [Way(name, options, build_drafter(options, target)) for name, options in ways.items()]
    loaded = read_prompts(prompts, target, limit)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("decoding", total=len(loaded))
        result = compare(target, built, loaded, max_tokens, depth, lambda done: progress.update(task, completed=done))
    vocabulary = target.model.spec.vocabulary_size
    target.model.close()
    result["step_ms"] = step_ms(draft, adapter, store_directory(read), vocabulary)
    result |= {
        "draft": str(draft),
        "adapter": adapter,
        "max_tokens": max_tokens,
        "depth": depth,
        "exactness": exactness.value,
    }
    if json_out is not None:
        json_out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    Console().print(_table(result))
    if exactness is Exactness.BIT and not result["identical"]:
        raise DataError("the outputs differ between the ways: that is a bug, please report it")


def _ways(read: ClusterConfig, base: Path, draft: Path, adapter: str) -> dict[str, EngineOptions]:
    suffix = next((one for one in read.drafts if isinstance(one, SuffixDraft)), SuffixDraft(method="suffix"))
    model = ModelDraft(method="model", source=str(draft), adapter=adapter)

    def options(*drafts: Draft) -> EngineOptions:
        return engine_options(read.model_copy(update={"drafts": drafts}), base)

    return {PLAIN: options(), SUFFIX: options(suffix), BOTH: options(suffix, model), ALONE: options(model)}


def _table(result: dict[str, Any]) -> Table:
    caption = (
        f"tokens a verification / TPOT in ms; identical output: {'yes' if result['identical'] else 'NO'}; "
        f"gain: TPOT of suffix over suffix + draft; "
        f"one drafted token takes {result['step_ms']:.2f} ms on {result['adapter']}"
    )
    table = Table(
        title="what the draft is worth, one request at a time", caption=caption, box=SIMPLE, padding=(0, 1, 0, 0)
    )
    table.add_column("category", no_wrap=True)
    for name in (PLAIN, SUFFIX, BOTH, ALONE, "gain"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["rows"]:
        cells = [
            f"{row['ways'][name]['mean_acceptance_length']:.2f} / {row['ways'][name]['tpot_ms']:.1f}"
            for name in (PLAIN, SUFFIX, BOTH, ALONE)
        ]
        table.add_row(row["category"], *cells, f"{row['draft_over_suffix']:.2f}x")
    return table
