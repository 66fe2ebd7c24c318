"""`outrider drafts`: stores that drafts come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from device_profiles.units import human_bytes
from orchestrator.bench.progress import show_progress
from orchestrator.cli.drafts_build import build
from orchestrator.cli.drafts_learn import learn
from orchestrator.cli.options import ConfigFile

app = typer.Typer(help="Stores that drafts come from: documents, answers, and what the target says itself.")
app.command()(build)
app.command()(learn)


@app.callback()
def drafts() -> None:
    """Stores that drafts come from: documents, answers, and what the target says itself."""


@app.command()
def index(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The documents: text files, and directories of them.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The store's file; DIR's name by default.")] = Path(),
    model: Annotated[str, typer.Option(help="The model whose tokens it holds, by its name; else the first.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Refuse documents of more tokens than this.")] = 50_000_000,
    config: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a store of the text files below DIR, for `drafts: [{method: index, path: ...}]`. Files that are no UTF-8
    text, and hidden ones, are left out."""
    from orchestrator.loading.document_index import index_documents

    path = output if output != Path() else Path(f"{directory.resolve().name}.drafts")
    found = show_progress(lambda progress: index_documents(directory, path, config, model, max_tokens, progress))
    if as_json:
        print(json.dumps(found, indent=1))
        return
    print(f"{path}: {found['documents']} documents, {found['tokens']} tokens, {human_bytes(found['bytes'])}")
    for name in found["left_out"]:
        print(f"left out: {name}")
    print(f"to use it: drafts: [{{method: suffix}}, {{method: index, path: {path.resolve()}}}]")
