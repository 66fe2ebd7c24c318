"""`outrider drafts`: stores that drafts come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from device_profiles.units import human_bytes
from orchestrator.cli.drafts_build import build
from orchestrator.cli.drafts_learn import learn
from orchestrator.cli.options import ConfigFile
from orchestrator.cli.progress import show_progress

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
    from orchestrator.generating.document_index import index_documents

    path = output if output != Path() else Path(f"{directory.resolve().name}.drafts")
    found = show_progress(lambda progress: index_documents(directory, path, config, model, max_tokens, progress))
    if as_json:
        print(json.dumps(found, indent=1))
        return
    print(f"{path}: {found['documents']} documents, {found['tokens']} tokens, {human_bytes(found['bytes'])}")
    for name in found["left_out"]:
        print(f"left out: {name}")
    print(f"to use it: drafts: [{{method: suffix}}, {{method: index, path: {path.resolve()}}}]")


@app.command()
def recommend(
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with `turns` (the first is used) or `prompt`; else our own.")
    ] = None,
    store: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A store of documents to try; may be repeated.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE", help="A draft model to try, as in cluster.yaml; may be repeated."),
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Use this many prompts, spread evenly; 0: all.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 96,
    config: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Decode prompts plainly and with each draft that is here, in turn, and say which to configure: the
    configuration's, suffix, and what is named, each alone and all together."""
    from orchestrator.config.load import default_config_path, load_config
    from orchestrator.recommend.run import RecommendJob, recommend_drafts
    from orchestrator.recommend.table import print_recommendation
    from orchestrator.worker.measuring.prompts import MeasurementError

    path = config or default_config_path()
    job = RecommendJob(
        load_config(path), path.resolve().parent, tuple(store or ()), tuple(model or ()), prompts, limit, max_tokens
    )
    result = show_progress(lambda progress: recommend_drafts(job, progress))
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        print_recommendation(result)
    if result["environment"]["exactness"] == "bit" and not result["summary"]["identical"]:
        raise MeasurementError("outputs differ from those without drafts: that is a bug, please report it")
