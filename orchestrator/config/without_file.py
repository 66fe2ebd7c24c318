"""The cluster.yaml that `outrider serve MODEL` stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from adapters.contract import AdapterUnavailable, ModelRefused
from adapters.device_check import check_device
from adapters.model_source import is_directory
from adapters.names import LLAMA_CPP
from adapters.vocabulary import SIMULATED_PREFIX
from orchestrator.config.load import load_text
from orchestrator.config.model import ClusterConfig
from orchestrator.config.target import AUTO
from orchestrator.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A configuration and the text that says the same. `path`: where that text would stand; nothing is there."""

    config: ClusterConfig
    text: str
    path: Path


def configure_model(
    source: str, base: Path, api: Mapping[str, Any], *, adapter: str = "", draft: str = ""
) -> ModelConfig:
    """Return the configuration that serves a model and leaves all else at its default, but for these keys of `api`.
    `adapter`: the runtime, "" for the default: the plan chooses for a GGUF file where llama.cpp's library is here, so
    that it serves within seconds. `draft`: a model that drafts behind the text's own repetitions, "" for none. `base`:
    where relative paths begin. Raises ConfigError, which names keys and no file."""
    runtime = {"adapter": "simulated"} if source.startswith(SIMULATED_PREFIX) else {}
    runtime = {"adapter": adapter} if adapter else runtime
    if not runtime:
        with suppress(AdapterUnavailable, ModelRefused):
            if not is_directory(source, base):
                check_device(LLAMA_CPP, "CPU")
                runtime = {"adapter": AUTO, "device": AUTO}
    sections: dict[str, Any] = {"model": {"source": source, **runtime}}
    if draft:
        sections["drafts"] = [{"method": "suffix"}, {"method": "model", "source": draft, **runtime}]
    if api:
        sections["api"] = dict(api)
    text = yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)
    # The daemon's state directory follows from this name, so each model has its own.
    path = base / f"serve-{re.sub(r'[^A-Za-z0-9.-]+', '-', source).strip('-')}.yaml"
    try:
        return ModelConfig(load_text(text, path), text, path)
    except ConfigError as error:
        raise ConfigError(re.sub(rf"^{re.escape(str(path))}:\d+: ", "", str(error), flags=re.MULTILINE)) from None
