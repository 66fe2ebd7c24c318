"""`outrider models`: which models a daemon has in memory, the prepared ones in the store, and what formats cost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from device_profiles.units import human_bytes
from orchestrator.cli.model_check import check
from orchestrator.cli.options import AsJson, ConfigFile, Yes, confirm, end_with_json, show_progress
from orchestrator.plain_table import print_lines, print_table

if TYPE_CHECKING:  # loaded where something is done
    from orchestrator.config.model import ClusterConfig
    from orchestrator.protocol.load_options import EngineOptions

app = typer.Typer(
    invoke_without_command=True, help="Models: what is in memory, what the store holds, and what formats keep."
)
app.command()(check)


@app.callback()
def models(context: typer.Context, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """List the models of the daemon that runs, with whether they are in memory, and the prepared ones in the store,
    with the quality that was measured of them."""
    if context.invoked_subcommand is not None:
        return
    from orchestrator.config.load import default_config_path, load_config, store_directory
    from orchestrator.worker.measuring.quality import list_stored_quality

    loaded = load_config(config or default_config_path(), sources=False)
    stored = list_stored_quality(store_directory(loaded))
    served = _list_served(loaded)
    end_with_json({"served": served, "stored": stored}, wanted=as_json)
    if served is None:
        print_lines("no daemon of this file runs here, or none answers", wraps=False)
    else:
        _print_served(served)
    _print(stored)


@app.command()
def quality(
    prompts: Annotated[Path, typer.Option(help="JSON lines with `turns` (the first is used) or `prompt`.")],
    weights: Annotated[str, typer.Option(help="as_file, fast, int4, int8, bf16, fp16, fp32; else as configured.")] = "",
    adapter: Annotated[str, typer.Option(help="The runtime; else as configured.")] = "",
    limit: Annotated[int, typer.Option(min=0, help="Use this many prompts, spread evenly; 0: all.")] = 0,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Prepare the model in a number format and measure it: perplexity and greedy choices beside the exact values in
    float32, and the time of a decode step. The figures are kept beside the weights, and `weights: auto` uses them."""
    from orchestrator.worker.measuring.quality import measure_quality

    options = _options(config, weights, adapter)
    texts = _prompts(options, prompts, limit)
    result = show_progress(lambda progress: measure_quality(options, texts, progress))
    end_with_json(result, wanted=as_json)
    for name in ("weights", "positions", "perplexity", "perplexity_ratio", "greedy_agreement", "step_ms"):
        value = result[name]
        print(f"{name:18} {value:.4f}" if isinstance(value, float) else f"{name:18} {value}")


@app.command()
def prune(config: ConfigFile = None, yes: Yes = False, as_json: AsJson = False) -> None:
    """Remove the prepared models that the configuration does not use. It asks first; --yes does not.

    Another configuration with the same store makes again what it needs, at its next start.
    """
    from adapters.model_store import ModelStore
    from orchestrator.config.load import default_config_path, load_config
    from orchestrator.config.store_use import measure_store_use

    path = config or default_config_path()
    usage = measure_store_use(load_config(path, sources=False), path.resolve().parent)
    if usage.unused:
        for artefact in usage.unused:
            sys.stderr.write(
                f"{artefact.path}: {human_bytes(artefact.size_bytes)} of {artefact.source}: {artefact.why}\n"
            )
        confirm(f"remove {human_bytes(usage.unused_bytes)} of prepared models", yes=yes)
    store = ModelStore(usage.root)
    removed = [artefact for artefact in usage.unused if store.remove(artefact.path)]
    freed = sum(artefact.size_bytes for artefact in removed)
    kept = [str(artefact.path) for artefact in usage.unused if artefact not in removed]
    end_with_json(
        {"removed": [str(artefact.path) for artefact in removed], "freed_bytes": freed, "kept": kept}, wanted=as_json
    )
    print(f"removed {len(removed)} of {len(usage.unused)} prepared models, {human_bytes(freed)}")
    for name in kept:
        print(f"kept {name}: another process makes or verifies it now")


def _list_served(config: ClusterConfig) -> list[dict[str, Any]] | None:
    from orchestrator.cli.daemon_socket import ask_daemon_of

    answer = ask_daemon_of(config, "/admin/status?most_devices=0")
    if answer is None:
        return None
    served = []
    for status in (answer, *answer["models"]):
        stays = {"keep": "always", "state": _STATES.get(status["phase"], status["phase"]), "why": status["detail"]}
        served.append({"model": status["model"], **(status["residency"] or stays)})
    return served


_STATES = {"ready": "loaded", "starting": "loading", "restarting": "loading"}
"""What the phase of a model that stays in memory means for that."""


def _print_served(served: list[dict[str, Any]]) -> None:
    rows = []
    for model in served:
        needs = " and ".join(f"{human_bytes(size)} on {device}" for device, size in model.get("needs", {}).items())
        state = f"{model['state']}: {model['why']}" if model["why"] else model["state"]
        rows.append((model["model"], model["keep"], state, str(model.get("waiting", "")), needs))
    print_table(("model", "keep", "in memory", "waiting", "needs"), rows)


def _options(config: Path | None, weights: str, adapter: str) -> EngineOptions:
    from adapters import registry
    from device_profiles.profile import DRAFT, FAST, Precision
    from orchestrator.config.load import default_config_path, load_config
    from orchestrator.fitting.worker_options import engine_options
    from orchestrator.worker.measuring.prompts import MeasurementError
    from policies.models.quantization import AS_FILE

    path = config or default_config_path()
    options = engine_options(load_config(path), path.resolve().parent)
    known = [AS_FILE, FAST, DRAFT, *(precision.value for precision in Precision)]
    if weights and weights not in known:
        raise MeasurementError(f"--weights is one of {', '.join(known)}, not {weights!r}")
    if adapter and adapter not in registry.names():
        raise MeasurementError(f"--adapter is one of {', '.join(registry.names())}, not {adapter!r}")
    if options.model.source.startswith("simulated:"):
        raise MeasurementError("the simulated model has no weights: there is nothing to measure")
    return options.with_model(weights=weights or options.model.weights, adapter=adapter or options.model.adapter)


def _prompts(options: EngineOptions, path: Path, limit: int) -> list[list[int]]:
    from adapters.contract import silent
    from orchestrator.worker.loading.prepared import load_own_tokenizer
    from orchestrator.worker.measuring.prompts import read_texts, spread

    texts = read_texts(path)
    tokenizer = load_own_tokenizer(options.model, silent)
    chosen = spread(texts, min(limit, len(texts)) or len(texts))
    return [tokenizer.encode_chat([{"role": "user", "content": text.text}]) for text in chosen]


def _print(stored: list[dict[str, Any]]) -> None:
    columns = ("model", "runtime", "weights", "size", "activations", "perplexity", "agreement", "step ms")
    rows = []
    for model in stored:
        shown = (Path(model["source"]).name, model["recipe_name"], model["weights"], human_bytes(model["bytes"]))
        for quality in model["quality"] or [None]:
            figures = ("", "not measured", "", "")
            if quality:
                ratio = f"{quality['perplexity']:.3f} (x {quality['perplexity_ratio']:.3f})"
                if not quality["perplexity"]:
                    ratio = "not all tokens"
                agreement, step_ms = f"{quality['greedy_agreement']:.1%}", f"{quality['step_ms']:.2f}"
                figures = (quality["activations"], ratio, agreement, step_ms)
            rows.append((*shown, *figures))
    print_table(columns, rows)
