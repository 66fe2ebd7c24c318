"""The shipped descriptions of well-known devices: device_profiles/library/*.yaml, one file a device.

Each figure names its source, and nothing is taken that has none:

    name: nvidia-l4
    full_name: NVIDIA L4 24 GB
    kind: gpu
    runtimes: [torch_device]
    sources:
      l4: {title: NVIDIA L4 Tensor Core GPU Datasheet, url: https://...}
    memory_gb: {value: 24, source: l4}
    matmul_tflops:
      bf16: {value: 121, source: l4, how: half of the figure that the datasheet gives with sparsity}
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from device_profiles.datasheet import Datasheet, Figure, Publication
from device_profiles.profile import Precision

LIBRARY = Path(__file__).with_name("library")


class DatasheetError(ValueError):
    """A description cannot be used; the message names the file and the place in it."""


_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]*$")]
_Url = Annotated[str, msgspec.Meta(pattern=r"^https://")]
_Positive = Annotated[float, msgspec.Meta(gt=0)]


class _Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: _Text
    url: _Url


class _Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: _Positive
    source: _Text
    how: str = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: _Name
    full_name: _Text
    kind: Literal["cpu", "gpu", "npu"]
    runtimes: list[str]
    sources: Annotated[dict[str, _Source], msgspec.Meta(min_length=1)]
    memory_gb: _Figure | None = None
    bandwidth_gb_per_s: _Figure | None = None
    power_w: _Figure | None = None
    cores: _Figure | None = None
    matmul_tflops: dict[Precision, _Figure] = {}


@cache
def load_known_devices() -> dict[str, Datasheet]:
    """Return the shipped descriptions by name."""
    return {sheet.name: sheet for sheet in (load_datasheet(path) for path in sorted(LIBRARY.glob("*.yaml")))}


def load_datasheet(path: Path) -> Datasheet:
    """Return the description of one file. Raises DatasheetError: unknown keys, wrong types, sources that are not
    there, sources that nothing uses, and a name that is not the file's are all refused."""
    try:
        file = msgspec.yaml.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise DatasheetError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise DatasheetError(f"{path}: {error}") from error
    if file.name != path.stem:
        raise DatasheetError(f"{path}: name is {file.name!r}, and must be the file's")
    used: set[str] = set()

    def figure(key: str, stated: _Figure) -> Figure:
        if stated.source not in file.sources:
            raise DatasheetError(f"{path}: {key}: there is no source {stated.source!r} among `sources`")
        used.add(stated.source)
        source = file.sources[stated.source]
        return Figure(stated.value, Publication(source.title, source.url), stated.how)

    def optional(key: str) -> Figure | None:
        stated = getattr(file, key)
        return None if stated is None else figure(key, stated)

    sheet = Datasheet(
        name=file.name,
        full_name=file.full_name,
        kind=file.kind,
        runtimes=tuple(file.runtimes),
        memory_gb=optional("memory_gb"),
        bandwidth_gb_per_s=optional("bandwidth_gb_per_s"),
        power_w=optional("power_w"),
        cores=optional("cores"),
        matmul_tflops={key: figure(f"matmul_tflops.{key}", stated) for key, stated in file.matmul_tflops.items()},
    )
    if unused := sorted(set(file.sources) - used):
        raise DatasheetError(f"{path}: sources: nothing uses {', '.join(unused)}")
    return sheet
