"""`outrider models check`: which runtimes here load a model, its memory, its drafts, and the lines to paste."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from device_profiles.units import human_bytes
from orchestrator.cli.options import AsJson, ConfigFile, print_json
from orchestrator.plain_table import print_lines, print_table

if TYPE_CHECKING:
    from orchestrator.config.model import ClusterConfig
    from orchestrator.planning.model_check import DraftSource, ModelCheck, RuntimeVerdict

Drafts = Annotated[list[str] | None, typer.Option("--draft", help="A model that may draft for it; may be repeated.")]


def check(
    source: Annotated[str, typer.Argument(help="The model, as model.source takes it: a path, hf:..., package:...")],
    draft: Drafts = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Say of a model, from its files' heads alone: its sizes, which runtimes here load it and why others do not, the
    memory that it takes, which drafts fit its vocabulary, and the lines of cluster.yaml that serve it.

    Drafts are those of --draft, and those of the configuration where there is one. The exit code is 1 where no runtime
    here loads the model.
    """
    from orchestrator.config.load import load_config
    from orchestrator.config.model import Limits
    from orchestrator.config.socket_place import find_config_path
    from orchestrator.planning.model_check import DraftSource, check_for_serving, summarise_check

    path = config or find_config_path()
    loaded = None if path is None else load_config(path, sources=False)
    drafts = [DraftSource(named, Path()) for named in draft or ()]
    if loaded is not None and path is not None:
        drafts += _list_configured(loaded, path.resolve().parent)
    limits = Limits() if loaded is None else loaded.limits
    checked = check_for_serving(source, Path(), int(limits.kv_cache), list(dict.fromkeys(drafts)))
    if as_json:
        print_json(summarise_check(checked))
    else:
        _print(checked)
    if not checked.loads:
        raise typer.Exit(1)


def _list_configured(config: ClusterConfig, base: Path) -> list[DraftSource]:
    from orchestrator.config.drafts import ModelDraft
    from orchestrator.planning.model_check import DraftSource

    return [
        DraftSource(draft.source, base, draft.mismatched_vocabulary == "translate")
        for draft in config.drafts
        if isinstance(draft, ModelDraft)
    ]


def _print(check: ModelCheck) -> None:
    facts = [check.architecture or "of no named architecture", check.format]
    if check.parameters is not None:
        facts += [f"{_format_count(check.parameters)} parameters", f"context of {check.context_tokens:,} tokens"]
    print_lines(f"{check.source}: {', '.join(facts)}")
    print_table(("runtime", "loads it", "weights", "why not"), map(_build_row, check.runtimes))
    if check.kv_bytes_per_token is not None:
        print_lines(_describe_memory(check))
    if check.no_drafts:
        print_lines(f"Drafts: {check.no_drafts}")
    elif check.drafts:
        rows = [
            (draft.source, "no" if draft.refusal else "yes", draft.match, ", ".join(draft.runtimes), draft.refusal)
            for draft in check.drafts
        ]
        print_table(("draft", "fits", "vocabulary", "runtimes", "why not"), rows)
    if check.cluster_yaml:
        print_lines("", "cluster.yaml:", "")
        print_lines(*check.cluster_yaml.splitlines(), wraps=False)


def _build_row(verdict: RuntimeVerdict) -> tuple[str, ...]:
    loads = f"yes: {', '.join(verdict.devices)}" if verdict.loads else "no"
    weights = "" if verdict.weights_bytes is None else human_bytes(verdict.weights_bytes)
    return verdict.runtime, loads, weights, verdict.refusal or verdict.missing


def _describe_memory(check: ModelCheck) -> str:
    per_token, context, held = check.kv_bytes_per_token or 0, check.context_tokens or 0, check.text_tokens or 0
    state = f", beside a state of {human_bytes(check.state_bytes)}" if check.state_bytes else ""
    whole = f"{human_bytes(per_token * context)} for the whole context{state}"
    cache = f"limits.kv_cache of {human_bytes(check.kv_cache_bytes)}"
    holds = f"{cache} holds it" if held == context else f"{cache} holds {held:,} tokens of it"
    return f"KV cache: {human_bytes(per_token)} a token, {whole}; {holds}."


def _format_count(count: int) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,}"
