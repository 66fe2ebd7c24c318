"""The weights of an IR, written while its graph is built, and the graph over them.

The graph is built over zeros that take no memory, and saved; then each constant's place in the saved file becomes that
of its weights.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import numpy as np

from adapters.decoder.weight_file import Block, WeightFile
from adapters.source_meter import SourceMeter

_TYPES: Final[dict[str, Any]] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


class IrFile(WeightFile):
    """The .bin of an IR: the weights part by part, then what is left of the graph's constants."""

    def __init__(self, path: Path, meter: SourceMeter) -> None:
        """Raises OSError."""
        super().__init__(path, meter)
        self._placed: dict[str, Block] = {}
        self._zeros = mmap.mmap(-1, mmap.PAGESIZE)
        self._held: list[Any] = []

    def build_constant(self, block: Block) -> Any:
        """Return the constant of a block of the file. Its values are zeros until the graph is saved."""
        import openvino as ov

        self._placed[block.name] = block
        dtype = np.dtype(_TYPES.get(block.kind, np.uint8))
        zeros = np.frombuffer(self._find_zeros(block.size), dtype, block.size // dtype.itemsize)
        self._held.append(zeros)
        tensor = ov.Tensor(zeros, ov.Shape(list(block.shape)), getattr(ov.Type, block.kind))
        made = ov.op.Constant(tensor, shared_memory=True)
        made.set_friendly_name(block.name)
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
                    constants.seek(place[0])
                    moved[place] = self.append(memoryview(constants.read(place[1])))
                data.set("offset", str(moved[place]))
            else:
                data.set("offset", str(block.offset))

    def _find_zeros(self, size: int) -> mmap.mmap:
        """Return memory of zeros that takes none: it is never written to."""
        if len(self._zeros) < size:
            self._zeros = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
        return self._zeros


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
