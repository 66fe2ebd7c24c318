"""The head of a model: all that whoever loads a prepared model reads of its files, without the weights.

A prepared model is loaded with a look at the files that it was made from: sizes, shapes, vocabulary. Where these files
are replaced while a model is served, its head stands for them:

    head.json          the files in their order, their lengths, and what is kept of each
    files/NAME         of each, its beginning: metadata and list of tensors; small files whole
                       behind it the few values that opening a model looks at, such as factors of its rope
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from adapters.artefact import publish
from adapters.contract import ModelRefused, Progress
from adapters.decoder.source import list_shape_values
from adapters.genai_facts import GENAI_WEIGHTS_SUFFIX
from adapters.gguf_header import read_header
from adapters.hf_directory import IR_TOKENIZER_FILES
from adapters.ir_facts import IR_FILE, IR_WEIGHTS
from adapters.safetensors_file import count_head_bytes

FACTS: Final = "head.json"
_FILES = "files"
_FORMAT = 2


class HeadRecipe:
    """The recipe of the model store that keeps the head of a model's `files`, of which its source is the first."""

    name = "head"

    def __init__(self, files: tuple[Path, ...], *, directory: bool) -> None:
        self._files = files
        self._directory = directory

    def recipe(self) -> str:
        return f"model head, {_FORMAT}"

    def prepare(self, source: Path, target: Path, progress: Progress) -> None:
        """Write the heads into the directory `target`. Raises ModelRefused for a damaged file, and OSError."""
        progress("keeping the model's head", -1.0)
        kept = target / _FILES
        kept.mkdir()
        facts: dict[str, Any] = {"directory": self._directory, "files": {}}
        values = list_shape_values(source)
        for file in self._files:
            begins = _count_head_bytes(file)
            pieces = [(0, begins), *sorted((at, count) for path, at, count in values if path == file and count)]
            with file.open("rb") as whole, (kept / file.name).open("wb") as head:
                for at, count in pieces:
                    _copy(whole.fileno(), head.fileno(), at, count)
            facts["files"][file.name] = {"bytes": file.stat().st_size, "pieces": pieces}
        (target / FACTS).write_text(json.dumps(facts), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is kept of a file of `size` bytes: its `pieces`, by their places and lengths in it, are one behind the other
    in the file `head`."""

    head: Path
    size: int
    pieces: tuple[tuple[int, int], ...]

    def write(self, file: Path) -> None:
        """Write the file, with holes between the pieces, and through to the disk. Raises OSError."""
        with self.head.open("rb") as kept, file.open("wb") as whole:
            for at, count in self.pieces:
                whole.seek(at)
                whole.write(kept.read(count))
            whole.truncate(self.size)
            whole.flush()
            os.fsync(whole.fileno())

    def is_in(self, file: Path) -> bool:
        try:
            with self.head.open("rb") as kept, file.open("rb") as whole:
                if whole.seek(0, os.SEEK_END) != self.size:
                    return False
                for at, count in self.pieces:
                    whole.seek(at)
                    if whole.read(count) != kept.read(count):
                        return False
        except OSError:
            return False
        return True


def restore_head(artefact: Path, place: Path) -> tuple[Path, tuple[Path, ...]]:
    """Return a model's path and its files as they were, made once at `place` from its head, and made anew where they
    are damaged. The weights in them are holes, which take no space. Raises ModelRefused where the head is damaged, and
    OSError."""
    try:
        facts = json.loads((artefact / FACTS).read_text(encoding="utf-8"))
        directory = bool(facts["directory"])
        files = {
            str(name): _Kept(
                artefact / _FILES / name,
                int(file["bytes"]),
                tuple((int(at), int(count)) for at, count in file["pieces"]),
            )
            for name, file in facts["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelRefused(f"{artefact}: the head of the model is damaged ({error})") from error

    def is_whole() -> bool:
        return all(kept.is_in(place / name) for name, kept in files.items())

    if not is_whole():
        mark = f"{os.getpid()}-{secrets.token_hex(4)}"
        draft, aside = (place.with_name(f".{place.name}.{purpose}-{mark}") for purpose in ("new", "old"))
        try:
            draft.mkdir(parents=True)
            for name, kept in files.items():
                kept.write(draft / name)
            try:
                publish(draft, place, aside)
            except OSError:
                if not is_whole():  # else another process was sooner
                    raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            shutil.rmtree(aside, ignore_errors=True)
    paths = tuple(place / name for name in files)
    return (place if directory else paths[0]), paths


def _count_head_bytes(file: Path) -> int:
    """Return how many bytes of a file are read without its weights."""
    if file.suffix == ".safetensors":
        return count_head_bytes(file)
    if file.name == IR_WEIGHTS or file.suffix == GENAI_WEIGHTS_SUFFIX:
        return 0
    if file.suffix in (".json", ".jinja", ".onnx") or file.name in (IR_FILE, *IR_TOKENIZER_FILES):
        return file.stat().st_size
    return min(read_header(file).data_offset, file.stat().st_size)


def _copy(source: int, target: int, start: int, count: int) -> None:
    done = 0
    while done < count and (sent := os.sendfile(target, source, start + done, count - done)):
        done += sent
