"""The weights of an IR, written while its graph is built: memory never holds more of them than one product needs.

    NAME.bin     the weights, part by part, then what is left of the graph's constants
    NAME.kept    a line of JSON for each part that is written, with its digest: what a conversion that was ended goes on
                 from; the first line says what the source was

The graph is built over zeros that take no memory, and saved; then each constant's place in the saved file becomes that
of its weights.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Final
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from adapters.artefact import KEPT_SUFFIX
from adapters.source_meter import SourceMeter
from device_profiles.units import MIB

_ALIGNED_BYTES: Final = 64
_CHUNK_BYTES: Final = 4 * MIB
_TYPES: Final[dict[str, Any]] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


@dataclass(frozen=True, slots=True)
class Block:
    """One constant. `kind`: its element type, as OpenVINO calls it. `offset` and `size` in bytes."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Part:
    """What is written at once: the constants of a matrix, or of several that are stacked. `read_bytes`: what was read
    of the source for it."""

    key: str
    blocks: tuple[Block, ...]
    read_bytes: int
    digest: str


class WeightFile:
    """Writes `path` (.bin), or goes on with what an earlier process wrote of it."""

    def __init__(self, path: Path, meter: SourceMeter) -> None:
        """Raises OSError."""
        self._path, self._meter = path, meter
        self._journal_path = path.with_suffix(KEPT_SUFFIX)
        self._parts = {part.key: part for part in _read_journal(self._journal_path, meter.identity)}
        blocks = [block for part in self._parts.values() for block in part.blocks]
        self._end = max((block.offset + block.size for block in blocks), default=0)
        self._counted = meter.done_bytes
        self._placed: dict[str, Block] = {}
        self._zeros = mmap.mmap(-1, mmap.PAGESIZE)
        self._held: list[Any] = []
        self._data = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        _write_journal(self._journal_path, meter.identity, self._parts.values())
        self._journal = self._journal_path.open("a", encoding="utf-8")

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._journal.close()
        os.close(self._data)

    def find(self, key: str) -> Part | None:
        """Return a part that is written already, None where it is not, or is not as it was written."""
        part = self._parts.get(key)
        if part is None:
            return None
        if self._digest(part.blocks) != part.digest:
            del self._parts[key]
            return None
        self._meter.note(f"{self._path.name}: {key}", part.read_bytes)
        self._counted = self._meter.done_bytes
        return part

    def write(self, key: str, constants: Iterable[tuple[str, Sequence[int], Iterable[NDArray[Any]]]]) -> Part:
        """Write a part: of each constant its element type, its shape, and its values piece by piece. Raises OSError."""
        digest, blocks = blake2b(digest_size=16), []
        for kind, shape, pieces in constants:
            offset = -(-self._end // _ALIGNED_BYTES) * _ALIGNED_BYTES
            self._end = offset
            for piece in pieces:
                data = np.ascontiguousarray(piece).data.cast("B")
                digest.update(data)
                self._put(data)
            blocks.append(Block(kind, tuple(shape), offset, self._end - offset))
        read_bytes, self._counted = self._meter.done_bytes - self._counted, self._meter.done_bytes
        part = Part(key, tuple(blocks), read_bytes, digest.hexdigest())
        self._parts[key] = part
        if self._meter.read_identity() == self._meter.identity:  # else it may be of other files than the rest
            self._journal.write(f"{json.dumps(asdict(part))}\n")
            self._journal.flush()
        return part

    def build_constant(self, part: Part, number: int) -> Any:
        """Return the constant of one of a part's blocks. Its values are zeros until the graph is saved."""
        import openvino as ov

        block, name = part.blocks[number], f"{part.key}/{number}"
        self._placed[name] = block
        dtype = np.dtype(_TYPES.get(block.kind, np.uint8))
        zeros = np.frombuffer(self._find_zeros(block.size), dtype, block.size // dtype.itemsize)
        self._held.append(zeros)
        tensor = ov.Tensor(zeros, ov.Shape(list(block.shape)), getattr(ov.Type, block.kind))
        made = ov.op.Constant(tensor, shared_memory=True)
        made.set_friendly_name(name)
        return made

    def save(self, model: Any, path: Path) -> None:
        """Write the graph to `path` (.xml), its constants behind the weights. Raises RuntimeError or OSError."""
        import openvino as ov

        graph = path.with_name(f"graph-of-{path.name}")
        constants = graph.with_suffix(".bin")
        try:
            ov.save_model(model, graph, compress_to_fp16=False)
            tree = ElementTree.parse(graph)  # noqa: S314  # we have just written it
            with constants.open("rb") as data:
                self._place(tree, data)
            keep_compressed(tree)
            tree.write(path)
            os.ftruncate(self._data, self._end)
        finally:
            graph.unlink(missing_ok=True)
            constants.unlink(missing_ok=True)

    def _place(self, tree: Any, constants: Any) -> None:
        """Let every constant of a saved graph lie in this file."""
        moved: dict[tuple[int, int], int] = {}
        for layer in tree.iter("layer"):
            if layer.get("type") != "Const":
                continue
            data, block = layer.find("data"), self._placed.get(layer.get("name"))
            if block is None:
                place = int(data.get("offset")), int(data.get("size"))
                if place not in moved:
                    moved[place] = self._end = -(-self._end // _ALIGNED_BYTES) * _ALIGNED_BYTES
                    constants.seek(place[0])
                    self._put(memoryview(constants.read(place[1])))
                data.set("offset", str(moved[place]))
            else:
                data.set("offset", str(block.offset))

    def _put(self, data: memoryview) -> None:
        while data:
            written = os.pwrite(self._data, data, self._end)
            self._end += written
            data = data[written:]

    def _digest(self, blocks: Sequence[Block]) -> str:
        digest = blake2b(digest_size=16)
        for block in blocks:
            for first in range(block.offset, block.offset + block.size, _CHUNK_BYTES):
                digest.update(os.pread(self._data, min(_CHUNK_BYTES, block.offset + block.size - first), first))
        return digest.hexdigest()

    def _find_zeros(self, size: int) -> mmap.mmap:
        """Return memory of zeros that takes none: it is never written to."""
        if len(self._zeros) < size:
            self._zeros = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
        return self._zeros


def _read_journal(path: Path, identity: object) -> Iterator[Part]:
    """Yield the parts of which a journal tells, where it is of this source; what is behind a line that was not written
    to its end is not believed."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        lines = path.read_text(encoding="utf-8").splitlines()
        if not lines or json.loads(lines[0]) != identity:
            return
        for line in lines[1:]:
            told = json.loads(line)
            blocks = tuple(
                Block(one["kind"], tuple(one["shape"]), one["offset"], one["size"]) for one in told["blocks"]
            )
            yield Part(told["key"], blocks, told["read_bytes"], told["digest"])


def _write_journal(path: Path, identity: object, parts: Iterable[Part]) -> None:
    draft = path.with_name(f".{path.name}.new")
    lines = [json.dumps(identity), *(json.dumps(asdict(part)) for part in parts)]
    draft.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    draft.replace(path)


def keep_compressed(tree: Any) -> None:
    """Mark in a saved IR that 16-bit matrices are stored weights, as OpenVINO's own compression marks them.

    Without the mark, loading first widens every one of them to float32: four times the file in memory at once. The
    mark can be written in the file only: Python has no way to set it on a node.
    """
    layers = {layer.get("id"): layer for layer in tree.iter("layer")}
    for edge in tree.iter("edge"):
        source, target = layers[edge.get("from-layer")], layers[edge.get("to-layer")]
        if source.get("type") != "Const" or target.get("type") != "Convert":
            continue
        port = target.find("input/port")
        if port is not None and port.get("precision") in ("BF16", "FP16") and len(port.findall("dim")) > 1:
            marks = ElementTree.Element("rt_info")
            ElementTree.SubElement(marks, "attribute", name="decompression", version="0")
            target.insert(1, marks)
