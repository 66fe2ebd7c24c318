"""`outrider drafts`: stores that drafts come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from device_profiles.units import human_bytes
from orchestrator.cli.options import AsJson, ConfigFile, end_with_json, print_json, show_progress
from orchestrator.errors import ConfigError

app = typer.Typer(help="Stores that drafts come from: documents, answers, and what the target says itself.")


@app.callback()
def drafts() -> None:
    """Stores that drafts come from: documents, answers, and what the target says itself."""


@app.command()
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
    as_json: AsJson = False,
) -> None:
    """Let the target write, and count what it says most often: drafts that cost microseconds. A run that was stopped
    goes on where it was. Ctrl-C counts what there is."""
    from orchestrator.generating.build import StatisticsJob, build_statistics
    from orchestrator.generating.generate import Settings
    from orchestrator.generating.progress import ConsoleShow

    if prompts is not None and texts is not None:
        raise ConfigError("--prompts and --texts: give one of them")
    settings = Settings(tokens, minutes * 60.0, concurrency, max_tokens)
    job = StatisticsJob(
        *(settings, config, model, data, output, max_entries),
        prompts=_read_prompts(prompts) if prompts is not None else (),
        documents=_read_documents(texts) if texts is not None else (),
    )
    result = build_statistics(job, ConsoleShow())
    end_with_json(result, wanted=as_json)
    print(_format_statistics(result))


def _read_prompts(path: Path) -> list[str]:
    from orchestrator.worker.measuring.prompts import read_texts

    return [prompt.text for prompt in read_texts(path)]


def _read_documents(directory: Path) -> list[str]:
    from orchestrator.generating.document_index import list_text_files, read_text_file

    texts = [text for file in list_text_files(directory) if (text := read_text_file(file)) is not None]
    if not texts:
        raise ConfigError(f"{directory}: has no text files; name the directory of the texts")
    return texts


def _format_statistics(result: dict[str, Any]) -> str:
    agreement = ", ".join(f"{kind} {share:.0%}" for kind, share in result["agreement"].items())
    use = f"to use it: drafts: [{{method: suffix, statistics: {result['path']}}}]"
    if result["kept_beside_model"]:
        use = "it is used from the next start on (drafts: [{method: suffix}])"
    return (
        f"{result['path']}: {result['entries']} entries, {human_bytes(result['bytes'])}, of {result['tokens']} tokens "
        f"in {result['texts']} texts of {result['model']}\n"
        f"right on texts that were not counted: {agreement or 'not known, there are too few'}\n{use}"
    )


@app.command()
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
    as_json: AsJson = False,
) -> None:
    """Make a store of the answers that the draft store on disk has kept, for `drafts: [{method: index, path: ...}]`.
    A daemon that uses the file already takes the new one by itself."""
    from orchestrator.clock import SystemClock
    from orchestrator.generating.answer_index import LearnJob, index_answers

    job = LearnJob(output, config, model, redact or (), all_keys, max_tokens)
    result = show_progress(lambda progress: index_answers(job, SystemClock(), progress))
    end_with_json(result, wanted=as_json)
    print(f"{output}: {result['documents']} answers, {result['tokens']} tokens, {human_bytes(result['bytes'])}")
    for what in ("redacted", "damaged"):
        if result[what]:
            print(f"left out as {what}: {result[what]}")
    drafts = f"[{{method: suffix}}, {{method: index, path: {output.resolve()}}}]"
    print(f"to use it: drafts: {drafts}")
    print(f"to try it first: canary: {{share: 0.1, drafts: {drafts}}}, and `outrider canary status` after a restart")


@app.command()
def index(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The documents: text files, and directories of them.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The store's file; DIR's name by default.")] = Path(),
    model: Annotated[str, typer.Option(help="The model whose tokens it holds, by its name; else the first.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Refuse documents of more tokens than this.")] = 50_000_000,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Make a store of the text files below DIR, for `drafts: [{method: index, path: ...}]`. Files that are no UTF-8
    text, and hidden ones, are left out."""
    from orchestrator.generating.document_index import index_documents

    path = output if output != Path() else Path(f"{directory.resolve().name}.drafts")
    result = show_progress(lambda progress: index_documents(directory, path, config, model, max_tokens, progress))
    end_with_json(result, wanted=as_json)
    print(f"{path}: {result['documents']} documents, {result['tokens']} tokens, {human_bytes(result['bytes'])}")
    for name in result["left_out"]:
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
    replica: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Compare for this item of `model.replicas`, from 0, and its drafts."),
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Use this many prompts, spread evenly; 0: all.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 96,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Decode prompts plainly and with each draft that is here, in turn, and say which to configure: the
    configuration's, suffix, and what is named, each alone and all together."""
    from orchestrator.config.load import default_config_path, load_config
    from orchestrator.recommend.run import RecommendJob, recommend_drafts
    from orchestrator.recommend.table import print_recommendation
    from orchestrator.worker.measuring.prompts import MeasurementError

    path = config or default_config_path()
    job = RecommendJob(
        *(load_config(path), path.resolve().parent, tuple(store or ()), tuple(model or ())),
        prompts=prompts,
        limit=limit,
        max_tokens=max_tokens,
        replica=replica,
    )
    result = show_progress(lambda progress: recommend_drafts(job, progress))
    if as_json:
        print_json(result)
    else:
        print_recommendation(result)
    if result["environment"]["exactness"] == "bit" and not result["summary"]["identical"]:
        raise MeasurementError("outputs differ from those without drafts: that is a bug, please report it")
