"""`export`: write the trained draft where a cluster.yaml can name it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from orchestrator.generating.data import Shards
from outrider_lab.distill.cli_train import require_torch


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
