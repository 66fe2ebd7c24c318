"""What a benchmark runs of all that it could run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from orchestrator.worker.measuring.prompts import PromptText
from outrider_lab.bench.errors import BenchError

if TYPE_CHECKING:  # loaded where a configuration is read
    from orchestrator.config.model import ClusterConfig
    from orchestrator.protocol.load_options import EngineOptions

_Named = TypeVar("_Named", bound="Named")


class Named(Protocol):
    """What a benchmark runs several of."""

    @property
    def name(self) -> str: ...


def read_configured(config: Path | None) -> tuple[ClusterConfig, EngineOptions]:
    """Return a configuration (None: the default one) and its target's options, without a canary. Raises ConfigError."""
    from orchestrator.config.load import default_config_path, load_config
    from orchestrator.fitting.worker_options import engine_options
    from orchestrator.worker.measuring.canary_aside import leave_out_canary

    path = config or default_config_path()
    loaded = leave_out_canary(load_config(path))
    return loaded, engine_options(loaded, path.resolve().parent)


def select_by_name(only: str, every: Sequence[_Named]) -> list[_Named]:
    """Return those whose name the regular expression of `--only` finds. Raises BenchError, where that is none, too."""
    try:
        chosen = [one for one in every if re.search(only, one.name)]
    except re.error as error:
        raise BenchError(f"--only {only!r} is no regular expression: {error}") from error
    if not chosen:
        raise BenchError(f"--only {only!r} finds none of: {'; '.join(one.name for one in every)}")
    return chosen


def take_of_each(texts: Sequence[PromptText], count: int) -> list[PromptText]:
    """Return the first `count` prompts of each category: the first of all of them, then the second, and so on, so that
    prompts that run together are of several categories."""
    kinds: dict[str, list[PromptText]] = {}
    for text in texts:
        kinds.setdefault(text.category, []).append(text)
    return [of_kind[index] for index in range(count) for of_kind in kinds.values() if index < len(of_kind)]
