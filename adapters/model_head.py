"""The head of a model: all that whoever loads a prepared model reads of its files, without the weights.

A prepared model is loaded with a look at the files that it was made from: sizes, shapes, vocabulary. Where these files
are replaced while a model is served, its head stands for them:

    head.json          the files in their order, and their lengths
    files/NAME         the beginning of each: metadata and list of tensors; small files whole
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from adapters.contract import ModelRefused, Progress
from adapters.gguf_header import read_header
from adapters.safetensors_file import count_head_bytes

FACTS: Final = "head.json"
_FILES = "files"
_FORMAT = 1


class HeadRecipe:
    """The recipe of the model store that keeps the head of a model's `files`, of which its source is the first."""

    name = "head"

    def __init__(self, files: tuple[Path, ...], *, directory: bool) -> None:
        self._files = files
        self._directory = directory

    def recipe(self) -> str:
        """Return the format."""
        return f"model head, {_FORMAT}"

    def prepare(self, source: Path, target: Path, progress: Progress) -> None:
        """Write the heads into the directory `target`. Raises ModelRefused for a damaged file, and OSError."""
        progress("keeping the model's head", -1.0)
        kept = target / _FILES
        kept.mkdir()
        facts: dict[str, Any] = {"directory": self._directory, "files": {}}
        for file in self._files:
            count = _count_head_bytes(file)
            with file.open("rb") as whole, (kept / file.name).open("wb") as head:
                _copy(whole.fileno(), head.fileno(), count)
            facts["files"][file.name] = file.stat().st_size
        (target / FACTS).write_text(json.dumps(facts), encoding="utf-8")


def restore_head(artefact: Path, place: Path) -> tuple[Path, tuple[Path, ...]]:
    """Return a model's path and its files as they were, made once at `place` from its head. The weights in them are
    holes, which take no space. Raises ModelRefused where the head is damaged, and OSError."""
    try:
        facts = json.loads((artefact / FACTS).read_text(encoding="utf-8"))
        sizes = {str(name): int(size) for name, size in facts["files"].items()}
        directory = bool(facts["directory"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelRefused(f"{artefact}: the head of the model is damaged ({error})") from error
    if not place.is_dir():
        draft = place.with_name(f".{place.name}.{os.getpid()}-{secrets.token_hex(4)}")
        try:
            draft.mkdir()
            for name, size in sizes.items():
                shutil.copyfile(artefact / _FILES / name, draft / name)
                os.truncate(draft / name, size)
            with suppress(OSError):  # another process was sooner
                draft.rename(place)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    files = tuple(place / name for name in sizes)
    return (place if directory else files[0]), files


def _count_head_bytes(file: Path) -> int:
    """Return how many bytes of a file are read without its weights."""
    if file.suffix == ".safetensors":
        return count_head_bytes(file)
    if file.suffix == ".json" or file.suffix == ".jinja":
        return file.stat().st_size
    return min(read_header(file).data_offset, file.stat().st_size)


def _copy(source: int, target: int, count: int) -> None:
    done = 0
    while done < count and (sent := os.sendfile(target, source, done, count - done)):
        done += sent
