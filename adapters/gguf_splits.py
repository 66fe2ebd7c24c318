"""A GGUF model that llama-gguf-split cut into several files: it is one model, and is named by its first file.

    NAME-00001-of-00003.gguf     metadata, and some of the tensors or none
    NAME-00002-of-00003.gguf     further tensors, and which file of how many this is

Each file has a head of its own, unlike the parts of one file that packages carry (adapters.model_parts). All heads are
read, so that a file which is missing, or is of another model, is refused before a byte of weights is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from adapters.contract import ModelRefused
from adapters.gguf_header import GgufHeader, GgufTensor, read_header
from device_profiles.units import MIB

NUMBER, COUNT, TENSOR_COUNT = "split.no", "split.count", "split.tensors.count"
_NAME = re.compile(r"(?P<base>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII | re.DOTALL)
_AGAIN: Final = "Fetch all files of the model again, into a directory of their own."
_MOST_NAMES: Final = 5  # in a message. Not tuned.
_FIRST_READ_BYTES: Final = MIB  # only the first file has a vocabulary


def list_names(name: str) -> tuple[str, ...]:
    """Return the names that the files of a model have by the name of one of them; the name alone where it says nothing
    of others."""
    match = _NAME.fullmatch(name)
    if match is None or not int(match["count"]):
        return (name,)
    base, count = match["base"], match["count"]
    return tuple(f"{base}-{number:05d}-of-{count}.gguf" for number in range(1, int(count) + 1))


def strip_number(name: str) -> str:
    match = _NAME.fullmatch(name)
    return f"{match['base']}.gguf" if match else name


def list_first_files(names: Iterable[str]) -> list[str]:
    """Return which of these names an operator can give as a GGUF model, sorted: of a split one the first file only."""
    ggufs = {name for name in names if name.endswith(".gguf")}
    return sorted(name for name in ggufs if list_names(name)[0] == name or list_names(name)[0] not in ggufs)


def list_files(header: GgufHeader) -> tuple[str, ...]:
    """Return the names of all files of the model whose first file has this head, in order; one where it is not split.

    Raises ModelRefused where it is another file than the first, or has a name by which the others cannot be found.
    """
    count = header.integer(COUNT) or 1
    if count <= 1:  # a file that was joined again says 0
        return (header.path.name,)
    names, number = list_names(header.path.name), header.integer(NUMBER) or 0
    is_first = header.path.name == names[0]
    what = f"it is file {number + 1} of {count} of a split model"
    if len(names) != count or (number == 0 and not is_first):
        raise ModelRefused(
            f"{header.path.name}: {COUNT}: {what}, and its name does not say so. Give all files the names that they "
            f"had: NAME-00001-of-{count:05d}.gguf and so on."
        )
    if not is_first:
        raise ModelRefused(f"{header.path.name}: {NUMBER}: {what}. Name the first one: {names[0]}")
    return names


def list_beside(path: Path) -> tuple[Path, ...]:
    """Return a file, and what is beside it of a split model by its name, in order. No file is read."""
    files = (path.with_name(name) for name in list_names(path.name))
    return tuple(file for file in files if file == path or file.is_file())


def find_files(header: GgufHeader) -> tuple[Path, ...]:
    """Return the files of the model whose first file has this head, in order. Raises ModelRefused as `list_files` does,
    and where one of them is not beside the first."""
    files = tuple(header.path.with_name(name) for name in list_files(header))
    missing = [file.name for file in files[1:] if not file.is_file()]
    if missing:
        more = f" and {len(missing) - _MOST_NAMES} more" if len(missing) > _MOST_NAMES else ""
        raise ModelRefused(
            f"{header.path.name}: the model is split into {len(files)} files, and {header.path.parent} lacks "
            f"{', '.join(missing[:_MOST_NAMES])}{more}. Put all files into one directory."
        )
    return files


def read_model_header(path: Path, file_bytes: int | None = None) -> GgufHeader:
    """Read the heads of all files of a model, of which `path` is the first, as one. Raises ModelRefused as
    `adapters.gguf_header.read_header` does, which says what `file_bytes` is, `find_files` and `join_headers`."""
    first = read_header(path, file_bytes)
    others = (read_header(file, first_bytes=_FIRST_READ_BYTES) for file in find_files(first)[1:])
    return join_headers([first, *others])


def join_headers(headers: Sequence[GgufHeader]) -> GgufHeader:
    """Return the heads of all files of a model as one, with the metadata of the first.

    Raises ModelRefused, by the file, where they are not in order, are not of one model, or list a tensor twice.
    """
    first, tensors = headers[0], dict[str, GgufTensor]()
    if len(headers) == 1:
        return first
    expected = first.integer(TENSOR_COUNT)
    for number, header in enumerate(headers):
        _check_place(header, number, len(headers))
        if header.integer(TENSOR_COUNT) != expected:
            raise _refuse(
                header,
                f"{TENSOR_COUNT}: its model has {header.integer(TENSOR_COUNT)} tensors, and that of {first.path.name} "
                f"has {expected}: it is of another model",
            )
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise _refuse(header, f"the tensor {tensor.name} is in {tensors[tensor.name].path.name}, too")
            tensors[tensor.name] = tensor
    if len(tensors) != expected:
        raise _refuse(first, f"{TENSOR_COUNT}: it is {expected}, and the files hold {len(tensors)} tensors")
    return replace(first, tensors=tuple(tensors.values()))


def _check_place(header: GgufHeader, number: int, count: int) -> None:
    if header.integer(COUNT) != count:
        raise _refuse(header, f"{COUNT}: it is {header.integer(COUNT)}, and the model is split into {count} files")
    if header.integer(NUMBER) != number:
        raise _refuse(
            header, f"{NUMBER}: it is {header.integer(NUMBER)}, and file {number + 1} of {count} has {number}"
        )


def _refuse(header: GgufHeader, reason: str) -> ModelRefused:
    return ModelRefused(f"{header.path.name}: {reason}. {_AGAIN}")
