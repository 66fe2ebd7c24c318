"""The one place where names of devices are taken apart and compared. Each runtime has spellings of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

CPU_KIND = "cpu"
"""The kind of every processor."""
CUDA_KIND = "cuda"
"""The kind of NVIDIA's devices, and of AMD's as torch calls them."""

_PARTS = re.compile(r"([^:.\d]*)[:.]?(.*)", re.DOTALL)


def split_device(device: str) -> tuple[str, str]:
    """Return a device's kind in small letters, and what tells it from others of its kind ("" where nothing does):
    "CUDA:1", "cuda1" and "CUDA.1" are ("cuda", "1")."""
    kind, number = _take_apart(device)
    return kind.casefold(), number


@lru_cache(maxsize=4096)
def _take_apart(device: str) -> tuple[str, str]:
    kind, number = _PARTS.fullmatch(device).groups()  # type: ignore[union-attr]  # everything matches
    return kind, number


def is_processor(device: str) -> bool:
    """Return whether a name is that of a processor."""
    return split_device(device)[0] == CPU_KIND


def find_index(device: str) -> int | None:
    """Return a device's number among those of its kind, 0 where it has none; None where it is told by no number."""
    number = split_device(device)[1] or "0"
    return int(number) if number.isdecimal() else None


def name_compute_unit(device: str) -> str:
    """Return one name for a device that runtimes call by several: the first of a kind needs no number, and the
    separator is theirs ("CUDA", "cuda:0", "CUDA0"; "GPU", "GPU.0"). A processor is one, whatever its number."""
    kind, number = split_device(device)
    if kind == CPU_KIND:
        return CPU_KIND
    index = find_index(device)
    return f"{kind}:{number.casefold().replace('.', ':') if index is None else index}"


def number_unit(device: str) -> str:
    """Return what tells a device from others of its kind, however it is spelt: "0" for the first of them, "" for a
    processor."""
    return name_compute_unit(device).partition(":")[2]


def name_without_number(device: str) -> str:
    """Return a device's name without what tells it from others of its kind: "CUDA" of "CUDA:1"."""
    return _take_apart(device)[0]


def name_compute_place(place: str) -> str:
    """Return one name for a device of a host, "HOST/DEVICE". What has no host stays as it is."""
    host, slash, device = place.rpartition("/")
    return f"{host}/{name_compute_unit(device)}" if slash else place


def is_same_device(device: str, other: str) -> bool:
    """Return whether two names are those of one device of a host."""
    return name_compute_unit(device) == name_compute_unit(other)


def find_device_name(device: str, names: Iterable[str]) -> str | None:
    """Return which of the names is that of a device: its very own, else another spelling of it. None: none is."""
    known = list(names)
    return device if device in known else next((name for name in known if is_same_device(name, device)), None)


def list_rank_devices(device: str, count: int) -> list[str]:
    """Return the devices that `count` ranks take: from the named one on those of its kind, or all the one processor.
    They are spelt as torch does."""
    first = find_index(device)
    if count == 1 or is_processor(device) or first is None:
        return [device] * count
    kind = name_without_number(device)
    return [f"{kind}:{first + rank}" for rank in range(count)]
