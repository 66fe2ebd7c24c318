"""From the command's flags to what is compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec

from adapters.contract import silent
from orchestrator.config.model_keys import WeightsPrecision
from orchestrator.config.target import AUTO
from orchestrator.config.without_file import configure_model
from orchestrator.fitting.worker_options import engine_options
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.worker.loading.prepared import prepare_tokenizer_of
from orchestrator.worker.measuring.prompts import TEXTS, PromptText, read_texts, spread
from outrider_lab.bench.compare.endpoint import parse_endpoint
from outrider_lab.bench.compare.engines import Asked
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.selection import read_configured, take_of_each

WEIGHTS = get_args(WeightsPrecision)


def read_prompt_texts(path: Path | None, limit: int, per_category: int = 0) -> list[PromptText]:
    """Return `limit` prompts (0: all): of a file spread evenly, else our own, as many of each category. Where
    `per_category` is not 0, the first so many of each category instead. Raises BenchError."""
    own = [PromptText(str(number), category, text) for number, (category, text) in enumerate(TEXTS)]
    texts = own if path is None else read_texts(path)
    if per_category:
        return take_of_each(texts, per_category)
    if path is None:
        return own[: limit or len(own)]
    return spread(texts, min(limit, len(texts)) or len(texts))


def build_asked(
    config: Path | None,
    engines: Sequence[str],
    endpoints: Sequence[str],
    directories: Sequence[str],
    weights: Sequence[str],
    draft: str,
    api_key: str,
    at_once: int,
    threads: int,
    *,
    model: str = "",
    adapter: str = "",
) -> Asked:
    """Return what is compared. `model`: a source that stands for a configuration; then Outrider drafts with `draft`,
    too. Raises BenchError, ConfigError, and what adapters raise for a missing model."""
    from adapters.model_source import resolve

    options = _read_options(config, model, adapter, draft)
    # All engines decode the same prompts again and again: none may find an earlier prefill done.
    options = msgspec.structs.replace(options, max_running=at_once, prefix_reuse=False)
    if options.model.source.startswith("simulated:"):
        raise BenchError("other engines cannot load the simulated model; configure a real one")
    threads = options.model.threads or threads
    options = options.with_model(threads=threads)
    source = resolve(options.model.source, Path(options.model.base))
    try:
        urls = dict(parse_endpoint(text) for text in endpoints)
    except ValueError as error:
        raise BenchError(f"--endpoint: {error}") from None
    return Asked(
        options,
        source,
        prepare_tokenizer_of(options.model, source, silent),
        threads,
        at_once,
        only=list(engines),
        weights=_check_weights(weights),
        endpoints=urls,
        directories=dict(_parse_directory(text) for text in directories),
        draft=draft,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
    )


def _read_options(config: Path | None, model: str, adapter: str, draft: str) -> EngineOptions:
    """Return how Outrider runs: as a file says, or with a model alone."""
    from adapters import registry

    if model and config is not None:
        raise BenchError("--model stands for a cluster.yaml: give one of them")
    if adapter and adapter not in registry.names():
        raise BenchError(f"--adapter is one of {', '.join(registry.names())}, not {adapter!r}")
    if model:
        alone = configure_model(model, Path.cwd(), {}, adapter=adapter or "openvino_rt", draft=draft)
        options = engine_options(alone.config, Path.cwd())
    else:
        _, options = read_configured(config)
        options = options.with_model(adapter=adapter) if adapter else options
    if options.model.adapter == AUTO:
        raise BenchError("model.adapter is auto, and a comparison runs one runtime: name it with --adapter")
    return options


def _check_weights(weights: Sequence[str]) -> list[str]:
    for one in weights:
        if one not in WEIGHTS:
            raise BenchError(f"--weights is one of {', '.join(WEIGHTS)}, as model.weights in cluster.yaml, not {one!r}")
    return list(weights)


def _parse_directory(text: str) -> tuple[str, str]:
    name, _, directory = text.partition("=")
    if not name or not Path(directory).is_dir():
        raise BenchError(f"--model-of: write ENGINE=DIR with a directory that is there, not {text!r}")
    return name, str(Path(directory).absolute())
