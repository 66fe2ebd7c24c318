"""`generate`: let the target write the data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from adapters.tokenizer import load_tokenizer as tokenizer_of
from orchestrator.config.load import default_config_path
from orchestrator.generating.build import describe_target, read_writer_options
from orchestrator.generating.data import Shards
from orchestrator.generating.generate import Generator, Settings, interruptible
from orchestrator.generating.progress import ConsoleShow
from orchestrator.worker.loading.drafters import build_drafter
from orchestrator.worker.loading.engine import build_loop
from orchestrator.worker.loading.models import load_target


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
    show = ConsoleShow()
    path = config or default_config_path()
    options = read_writer_options(path, "", concurrency)
    with show.stage("loading the target"):
        target = load_target(options, lambda _stage, _fraction: None)
    tokenizer = tokenizer_of(target.tokenizer_dir)
    shards = Shards(data)
    shards.bind(describe_target(target, path.resolve().parent, sorted(tokenizer.eos_ids)))
    settings = Settings(tokens, minutes * 60.0, concurrency, max_tokens, top, seed)
    generator = Generator(build_loop(target, options, build_drafter(options, target)), tokenizer, shards, settings)
    with interruptible() as stopped, show.tokens(generator.labelled, tokens) as tell:
        generator.run(tell, stopped)
    target.model.close()
    show.console.print(f"{generator.labelled} labelled tokens in {data}")
