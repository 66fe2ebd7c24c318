"""`head`: train an EAGLE-3 head for a target that runs on torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider_lab.distill.cli_train import read_training_data, require_torch
from outrider_lab.distill.vocabulary import counts, most_frequent


def head(
    data: Annotated[Path, typer.Option(help="Directory that `outrider drafts build --data` wrote.")],
    out: Annotated[Path, typer.Option(help="The head's directory; training goes on from the head that is there.")],
    minutes: Annotated[float, typer.Option(min=0.0, help="How long to train.")] = 60.0,
    steps: Annotated[int, typer.Option(min=0, help="The most steps of this run; 0: as many as there is time for.")] = 0,
    outputs: Annotated[int, typer.Option(min=16, help="Tokens that the head may propose.")] = 8192,
    batch_rows: Annotated[int, typer.Option(min=1, help="Rows of 512 tokens in a step.")] = 4,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 1e-3,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
) -> None:
    """Train a head on a target's hidden states, for `drafts: [{method: head, source: DIRECTORY}]`.

    At the end it prints how often the head's first choice is the target's on held-out texts, by how many drafts are
    before it.
    """
    torch = require_torch()
    torch.set_num_threads(threads)
    from outrider_lab.distill.head import Bounds, Target, begin, train, write_head

    console = Console(stderr=True)
    facts, training, kept = read_training_data(data)
    target = Target(facts, out.with_name(f"{out.name}-target"))
    chosen = most_frequent(counts(training, facts.vocabulary_size), outputs, facts.end_ids)
    trained = begin(target, facts, chosen, out)
    held_out = [text for texts in kept.values() for text in texts]
    bounds = Bounds(minutes * 60.0, steps, batch_rows, learning_rate)
    train(trained, target, training, held_out, bounds, console.print)
    write_head(trained, out)
    shares = ", ".join(f"{share:.3f}" for share in trained.agreement)
    console.print(f"{out}: {trained.steps} steps in {trained.seconds:.0f} s; agreement at depth 1, 2, ...: {shares}")
