"""`generate`: let the target write the data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from adapters.hf_hub import HUB_PREFIX
from adapters.model_source import PACKAGE_PREFIX
from device_profiles.profile import Exactness
from orchestrator.config.load import default_config_path, load_config
from orchestrator.loading.drafters import build_drafter
from orchestrator.loading.engine import build_loop
from orchestrator.loading.models import LoadedTarget, load_target
from orchestrator.loading.models import load_tokenizer as tokenizer_of
from orchestrator.loading.options import EngineOptions, engine_options
from tools.distill.generate import Generator, Settings, interruptible
from tools.distill.shards import Shards, TargetFacts


def generate(
    data: Annotated[Path, typer.Option(help="Directory of the data; what is there is continued.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that the target is to write, over all runs.")] = 1_000_000,
    minutes: Annotated[float, typer.Option(min=0.0, help="Stop after this long; 0: not before there is enough.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Conversations at the same time.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=2, help="The longest answer.")] = 192,
    top: Annotated[int, typer.Option(min=1, help="Likeliest tokens to note at each position.")] = 8,
    seed: Annotated[int, typer.Option(help="Another seed gives other prompts.")] = 0,
    config: Annotated[Path | None, typer.Option(help="cluster.yaml with the target; else the default places.")] = None,
) -> None:
    """Let the target answer many prompts and write down its likeliest tokens at each position."""
    console = Console(stderr=True)
    path = config or default_config_path()
    options = _options(path, concurrency)
    with console.status("loading the target"):
        target = load_target(options, lambda _stage, _fraction: None)
    tokenizer = tokenizer_of(target.tokenizer_dir)
    shards = Shards(data)
    shards.bind(_facts(target, path.resolve().parent, sorted(tokenizer.eos_ids)))
    settings = Settings(tokens, minutes * 60.0, concurrency, max_tokens, top, seed)
    generator = Generator(build_loop(target, options, build_drafter(options, target)), tokenizer, shards, settings)
    with interruptible() as stopped, _progress(console) as progress:
        task = progress.add_task("tokens", total=tokens, completed=generator.labelled)
        generator.run(lambda count: progress.update(task, completed=count), stopped)
    target.model.close()
    console.print(f"{generator.labelled} labelled tokens in {data}")


def _options(path: Path, concurrency: int) -> EngineOptions:
    """Return the configured target's options, for many requests whose last bits do not matter."""
    read = load_config(path)
    changes = {
        "model": read.model.model_copy(update={"exactness": Exactness.KERNEL}),
        "limits": read.limits.model_copy(update={"max_running": concurrency}),
        "drafts": [draft for draft in read.drafts if draft.method == "suffix"],
    }
    return engine_options(read.model_copy(update=changes), path.resolve().parent)


def _facts(target: LoadedTarget, base: Path, end_ids: list[int]) -> TargetFacts:
    spec, source = target.model.spec, target.source
    if not source.startswith((PACKAGE_PREFIX, HUB_PREFIX)):  # a path, from the configuration's directory on
        source = str((base / Path(source).expanduser()).absolute())
    return TargetFacts(
        source, target.name, spec.vocabulary_size, spec.vocabulary_fingerprint, spec.context_length, end_ids
    )


def _progress(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)
