"""`train`: fit a draft to the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from orchestrator.generating.data import DataError, Shards, TargetFacts, Text
from orchestrator.generating.generate import interruptible
from outrider_lab.distill.lines import split_held_out
from outrider_lab.distill.vocabulary import counts, coverage, most_frequent

if TYPE_CHECKING:
    from outrider_lab.distill.train import State

_CHECKPOINT_EVERY = 50
BEST = "best"
"""Directory, within the checkpoint's, of the one that agreed most often with the target on held-out texts."""
ALL = "all"


def train(
    data: Annotated[Path, typer.Option(help="Directory that `outrider drafts build --data` wrote.")],
    out: Annotated[Path, typer.Option(help="Directory of the checkpoint; training goes on from what is there.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps over all runs; fixed by the first one.")] = 600,
    minutes: Annotated[float, typer.Option(min=0.0, help="Stop after this long; 0: not before the last step.")] = 0,
    outputs: Annotated[int, typer.Option(min=16, help="Tokens that the draft may propose.")] = 6144,
    hidden: Annotated[int, typer.Option(min=32)] = 192,
    layers: Annotated[int, typer.Option(min=1)] = 2,
    heads: Annotated[int, typer.Option(min=1)] = 6,
    mlp: Annotated[int, typer.Option(min=32)] = 512,
    batch_tokens: Annotated[int, typer.Option(min=64, help="Tokens of one step.")] = 8192,
    row_tokens: Annotated[int, typer.Option(min=16, help="Tokens that attend to one another.")] = 1024,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 3e-3,
    table_rate: Annotated[
        float, typer.Option(min=0.0, help="Times that, for the tables; 0: the embedding stays.")
    ] = 0.2,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps between looks at held-out texts.")] = 100,
    patience: Annotated[
        int, typer.Option(min=0, help="Stop after so many looks on end without a better one; 0: never.")
    ] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Train a draft, or go on with one; every look at held-out texts prints how often it agrees with the target.

    The checkpoint that agreed most often lies in `best` within `out`.
    """
    torch = require_torch()
    torch.set_num_threads(threads)
    from outrider_lab.distill.draft import Shape
    from outrider_lab.distill.train import CHECKPOINT, Plan, State

    console = Console(stderr=True)
    facts, training, kept = read_training_data(data)
    if (out / CHECKPOINT).exists():
        state = State.load(out)
        console.print(f"going on from step {state.step} of {state.plan.steps}; shape and plan are those it began with")
    else:
        if hidden % heads or heads % 2 or (hidden // heads) % 16:
            raise DataError(f"{hidden} elements in {heads} heads: give even heads of a multiple of 16 elements")
        warm_up = max(1, min(50, steps // 10))
        rows = min(row_tokens, batch_tokens)
        plan = Plan(steps, batch_tokens, rows, learning_rate, warm_up, table_rate, seed=seed)
        chosen = most_frequent(counts(training, facts.vocabulary_size), outputs, facts.end_ids)
        shape = Shape(facts.vocabulary_size, len(chosen), hidden, layers, heads, heads // 2, mlp)
        state = State.fresh(shape, chosen, plan)
        _start_from_target(state, facts, console)
    _describe(state, training, facts, console)
    try:
        _run(state, training, kept, out, minutes * 60.0, Looks(evaluate_every, patience), console)
    finally:
        state.save(out)
    console.print(f"step {state.step} of {state.plan.steps} is in {out}")


def read_training_data(data: Path) -> tuple[TargetFacts, list[Text], dict[str, list[Text]]]:
    """Return whose texts these are, those to train on, and the held-out ones by category. Raises DataError."""
    shards = Shards(data)
    facts = shards.target()
    training, kept = split_held_out(shards.texts())
    if not training or not kept:
        raise DataError(f"{data}: too little data to train on and to keep some; let `outrider drafts build` write more")
    return facts, training, kept


def require_torch() -> Any:
    """Import torch. Raises DataError with the install command."""
    try:
        import torch
    except ImportError:
        raise DataError("torch is not installed: pip install 'outrider-lab[distill]'") from None
    return torch


def _start_from_target(state: State, facts: TargetFacts, console: Console) -> None:
    """Begin with the target's embedding, where its source is still there."""
    from adapters.model_source import resolve
    from outrider_lab.distill.export import dense_embedding
    from outrider_lab.distill.train import begin_with

    with console.status("reading the target's embedding"):
        begin_with(state.draft, dense_embedding(resolve(facts.source, Path.cwd()).path), state.outputs)


def _describe(state: State, texts: Sequence[Text], facts: TargetFacts, console: Console) -> None:
    shape = state.draft.shape
    total = counts(texts, facts.vocabulary_size)
    weights = sum(weight.numel() for weight in state.draft.parameters())
    labelled = sum(len(text.top_ids) for text in texts)
    console.print(
        f"{weights / 1e6:.1f} M parameters, {shape.layers} layers of {shape.hidden}; {shape.outputs} outputs say "
        f"{coverage(total, state.outputs):.1%} of what the target said in {labelled} tokens of {len(texts)} texts"
    )


def _run(
    state: State,
    training: list[Text],
    kept: dict[str, list[Text]],
    out: Path,
    seconds: float,
    looks: Looks,
    console: Console,
) -> None:
    from outrider_lab.distill.train import run

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    losses: list[float] = []
    with interruptible() as stopped, Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=state.plan.steps, completed=state.step)

        def tell(step: int, loss: float) -> None:
            losses.append(loss)
            progress.update(task, completed=step, description=f"loss {np.mean(losses[-20:]):.3f}")
            if step % _CHECKPOINT_EVERY == 0:
                state.save(out)
            if step % looks.every == 0:
                found = agreements(state, kept)
                console.print(agreement_table(kept, found, f"step {step}, loss {np.mean(losses[-20:]):.3f}"))
                if looks.is_best(found[ALL]):
                    state.save(out / BEST)

        run(state, training, seconds=seconds, tell=tell, stopped=lambda: stopped() or looks.ended)
    found = agreements(state, kept)
    console.print(agreement_table(kept, found, f"step {state.step}"))
    if looks.is_best(found[ALL]):
        state.save(out / BEST)
    console.print(f"the best look, {looks.best:.3f}, is in {out / BEST}")


@dataclass(slots=True)
class Looks:
    """When held-out texts are looked at, and when to stop: after `patience` looks without a better one, 0 never."""

    every: int
    patience: int
    best: float = -1.0
    without_better: int = 0

    def is_best(self, share: float) -> bool:
        """Note a look; say whether no other one agreed as often."""
        better = share > self.best
        self.best, self.without_better = max(share, self.best), 0 if better else self.without_better + 1
        return better

    @property
    def ended(self) -> bool:
        """Whether nothing more is to be expected."""
        return 0 < self.patience <= self.without_better


def agreements(state: State, kept: dict[str, list[Text]]) -> dict[str, float]:
    """Return how often the draft's first choice is the target's on held-out texts, by category and over all."""
    from outrider_lab.distill.train import agreement

    every = [text for texts in kept.values() for text in texts]
    lots = [*kept.items(), (ALL, every)]
    return {name: agreement(state.draft, texts, state.outputs, state.plan.row_tokens) for name, texts in lots}


def agreement_table(kept: dict[str, list[Text]], found: dict[str, float], title: str) -> Table:
    """Show what `agreements` found, with the number of tokens that were asked for."""
    table = Table(title=f"held-out agreement with the target's first choice: {title}")
    for name in ("category", "tokens", "agreement"):
        table.add_column(name, justify="left" if name == "category" else "right")
    asked = {name: sum(len(text.top_ids) for text in texts) for name, texts in kept.items()}
    for name, share in found.items():
        table.add_row(name, str(asked.get(name, sum(asked.values()))), f"{share:.3f}")
    return table


def export(
    data: Annotated[Path, typer.Option(help="Directory that `outrider drafts build --data` wrote.")],
    checkpoint: Annotated[Path, typer.Option(help="Directory that `train` wrote.")],
    out: Annotated[Path, typer.Option(help="The draft's directory; an older export in it is replaced.")],
) -> None:
    """Write the draft as a Hugging Face directory, for `drafts: [{method: model, source: DIRECTORY}]`."""
    require_torch()
    from outrider_lab.distill.export import write_draft
    from outrider_lab.distill.train import State

    state = State.load(checkpoint)
    size = write_draft(state, Shards(data).target(), out)
    shape = state.draft.shape
    form = f"{shape.layers} layers of {shape.hidden}, {shape.outputs} outputs, step {state.step}"
    Console(stderr=True).print(f"{out}: {size / 1e6:.1f} MB, {form}")
