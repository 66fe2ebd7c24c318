"""From the command's flags to what is compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec

from orchestrator.bench.canary_aside import leave_out_canary
from orchestrator.bench.compare.endpoint import parse_endpoint
from orchestrator.bench.compare.engines import Asked
from orchestrator.bench.prompts import BenchError, PromptText, read_texts, spread
from orchestrator.config.load import default_config_path, load_config
from orchestrator.config.target import WeightsPrecision
from orchestrator.loading.models import prepare_tokenizer_of, silent
from orchestrator.loading.options import engine_options
from orchestrator.measuring.texts import TEXTS

WEIGHTS = get_args(WeightsPrecision)


def read_prompt_texts(path: Path | None, limit: int) -> list[PromptText]:
    """Return `limit` prompts (0: all): of a file spread evenly, else our own, as many of each category. Raises
    BenchError."""
    if path is None:
        own = [PromptText(str(number), category, text) for number, (category, text) in enumerate(TEXTS)]
        return own[: limit or len(own)]
    texts = read_texts(path)
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
) -> Asked:
    """Return what is compared. Raises BenchError, ConfigError, and what adapters raise for a missing model."""
    from adapters.model_source import resolve

    path = config or default_config_path()
    options = engine_options(leave_out_canary(load_config(path)), path.resolve().parent)
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
