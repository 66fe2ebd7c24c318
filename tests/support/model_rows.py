"""Which models the tests load, on which runtime: told above the test that does, and listed in docs/models.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Write = Callable[[Path, str], Path]
"""Writes a small model of this name into a directory, and returns what `model.source` would name."""
_T = TypeVar("_T")
_HEADS = re.compile(r"(?:ForCausalLM|ForConditionalGeneration|LMHeadModel)$")
_OTHER_NAMES = {"deepseekv2": "deepseek2", "deepseekv3": "deepseek2"}
"""Of Hugging Face's classes, where GGUF files have another name."""


@dataclass(frozen=True, order=True)
class ModelRow:
    """A model that a test loads. `needs`: the package that has to be there beside what the runtime needs, or ""."""

    architecture: str
    form: str
    runtime: str
    needs: str = ""


ROWS: set[ModelRow] = set()
NAMES: dict[tuple[str, str], str] = {}
"""By architecture and format: how these files spell it."""
SAMPLES: dict[tuple[str, str], dict[str, Write]] = {}
"""By architecture and format: what writes a small model of it, by that model's name."""


def loads_models(
    runtimes: str | Iterable[str],
    form: str,
    models: Iterable[str] | Mapping[str, str],
    write: Write | None = None,
    *,
    needs: str = "",
) -> Callable[[_T], _T]:
    """Say that a test loads and runs these models. `form`: how their files hold them ("GGUF", "safetensors", ...).
    `models`: names of architectures, or what each model is called and its architecture, as `general.architecture` or
    as the class in config.json. `write`: writes one by its name, to see what other runtimes say of it."""
    named = models if isinstance(models, Mapping) else {name: name for name in models}
    places = [runtimes] if isinstance(runtimes, str) else list(runtimes)
    for name, architecture in named.items():
        known = simplify(architecture)
        NAMES[known, form] = architecture
        ROWS.update(ModelRow(known, form, runtime, needs) for runtime in places)
        if write is not None:
            SAMPLES.setdefault((known, form), {})[name] = write
    return lambda test: test


def simplify(architecture: str) -> str:
    """Return one name for an architecture that GGUF files and config.json spell in two ways."""
    name = re.sub(r"[^a-z0-9]", "", _HEADS.sub("", architecture).lower())
    return _OTHER_NAMES.get(name, name)
