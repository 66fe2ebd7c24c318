"""`outrider drafts learn`: what the daemon answered becomes a store that drafts come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from device_profiles.units import human_bytes
from orchestrator.cli.options import ConfigFile
from orchestrator.cli.progress import show_progress


def learn(
    output: Annotated[Path, typer.Option("--output", "-o", help="The store's file.")] = Path("answers.drafts"),
    model: Annotated[str, typer.Option(help="The model whose answers, by its name; else the first.")] = "",
    redact: Annotated[
        list[str] | None,
        typer.Option(metavar="REGEX", help="Leave out answers with a match; may be repeated."),
    ] = None,
    all_keys: Annotated[
        bool, typer.Option("--all-keys", help="Let answers to one API key help all, where the draft store does not.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of more, the newest answers.")] = 50_000_000,
    config: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a store of the answers that the draft store on disk has kept, for `drafts: [{method: index, path: ...}]`.
    A daemon that uses the file already takes the new one by itself."""
    from orchestrator.clock import SystemClock
    from orchestrator.generating.answer_index import LearnJob, index_answers

    job = LearnJob(output, config, model, redact or (), all_keys, max_tokens)
    found = show_progress(lambda progress: index_answers(job, SystemClock(), progress))
    if as_json:
        print(json.dumps(found, indent=1))
        return
    print(f"{output}: {found['documents']} answers, {found['tokens']} tokens, {human_bytes(found['bytes'])}")
    for what in ("redacted", "damaged"):
        if found[what]:
            print(f"left out as {what}: {found[what]}")
    drafts = f"[{{method: suffix}}, {{method: index, path: {output.resolve()}}}]"
    print(f"to use it: drafts: {drafts}")
    print(f"to try it first: canary: {{share: 0.1, drafts: {drafts}}}, and `outrider canary status` after a restart")
