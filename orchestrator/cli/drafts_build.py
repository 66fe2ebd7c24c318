"""`outrider drafts build`: statistics of what the target says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from device_profiles.units import human_bytes
from orchestrator.cli.options import ConfigFile
from orchestrator.errors import ConfigError


def build(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that the target is to write, over all runs.")] = 500_000,
    minutes: Annotated[float, typer.Option(min=0.0, help="Count after this long; 0: not before there is enough.")] = 0,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts of your own: JSON lines with `turns` or `prompt`.")
    ] = None,
    texts: Annotated[Path | None, typer.Option(help="A directory of texts of your own to write about.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="The directory of what it wrote; what is there is continued. Else beside it.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file; else in the model store.")] = None,
    model: Annotated[str, typer.Option(help="The model, by its name; else the first.")] = "",
    concurrency: Annotated[int, typer.Option(min=1, help="Conversations at the same time.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=2, help="The longest answer.")] = 192,
    max_entries: Annotated[int, typer.Option(min=1, help="The most entries, of 13 bytes each.")] = 1_000_000,
    config: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Let the target write, and count what it says most often: drafts that cost microseconds. A run that was stopped
    goes on where it was. Ctrl-C counts what there is."""
    from orchestrator.generating.build import Asked, build_statistics
    from orchestrator.generating.generate import Settings
    from orchestrator.generating.progress import ConsoleShow

    if prompts is not None and texts is not None:
        raise ConfigError("--prompts and --texts: give one of them")
    settings = Settings(tokens, minutes * 60.0, concurrency, max_tokens)
    asked = Asked(
        *(settings, config, model, data, output, max_entries),
        prompts=_read_prompts(prompts) if prompts is not None else (),
        documents=_read_documents(texts) if texts is not None else (),
    )
    found = build_statistics(asked, ConsoleShow())
    print(json.dumps(found, indent=1) if as_json else _describe(found))


def _read_prompts(path: Path) -> list[str]:
    from orchestrator.worker.measuring.prompts import read_texts

    return [one.text for one in read_texts(path)]


def _read_documents(directory: Path) -> list[str]:
    from orchestrator.generating.document_index import list_text_files, read_text_file

    found = [text for file in list_text_files(directory) if (text := read_text_file(file)) is not None]
    if not found:
        raise ConfigError(f"{directory}: has no text files; name the directory of the texts")
    return found


def _describe(found: dict[str, Any]) -> str:
    agreement = ", ".join(f"{kind} {share:.0%}" for kind, share in found["agreement"].items())
    use = (
        "it is used from the next start on (drafts: [{method: suffix}])"
        if found["kept_beside_model"]
        else f"to use it: drafts: [{{method: suffix, statistics: {found['path']}}}]"
    )
    return (
        f"{found['path']}: {found['entries']} entries, {human_bytes(found['bytes'])}, of {found['tokens']} tokens in "
        f"{found['texts']} texts of {found['model']}\n"
        f"right on texts that were not counted: {agreement or 'not known, there are too few'}\n{use}"
    )
