"""Makes another model of a GGUF model's layers: deeper, of the same output, or with some of them left out.

A layer adds to its input what two projections give: attention's, and the feed-forward network's. Where both are zero,
it computes all that a layer computes, and adds nothing. So a deeper model says what the small one says, at the cost of
a model several times larger, and the small one is a draft of it of high acceptance. It stands for large models that
cannot be had; figures measured with it say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGUFReader, GGUFWriter

from adapters.gguf_splits import list_beside

_OUTPUTS: Final = ("attn_output", "ffn_down", "ffn_down_exps", "ffn_down_shexp")
"""The projections whose products a layer adds to its input; all formats of GGUF read zero bytes as zeros."""
_NOT_COPIED: Final = ("GGUF.", "general.architecture", "split.")
"""Keys that the writer writes itself, and what the new file is not: one of several."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of the new model: the source's layer of this number, or one that passes its input through."""

    source: int
    passes: bool = False


def spread_layers(count: int, wanted: int) -> list[Layer]:
    """Return `wanted` layers of a model that has `there`. More: each real one is followed by its share of copies that
    pass their input through. Fewer: the first, the last, and others in even steps."""
    if wanted < count:
        return [Layer(round(number * (count - 1) / max(1, wanted - 1))) for number in range(wanted)]
    ends = [round((number + 1) * wanted / count) for number in range(count)]
    return [
        Layer(number, passes=at > start)
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
        for at in range(start, end)
    ]


def write_layers(path: Path, source: Path, layers: Sequence[Layer], *, progress: bool = False) -> int:
    """Write a GGUF model of these layers of another one, with its embedding, output and tokenizer; returns how many
    parameters it has. `source`: its file, of a split model the first. Raises ValueError where it has no such layers, or
    what they add cannot be told."""
    readers = [GGUFReader(str(file)) for file in list_beside(source)]
    fields = readers[0].fields
    family = fields["general.architecture"].contents()
    writer = GGUFWriter(str(path), family)
    for name, field in fields.items():
        if not name.startswith(_NOT_COPIED):
            value = len(layers) if name == f"{family}.block_count" else field.contents()
            writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    parts: dict[int, list[tuple[str, Any]]] = {}
    parameters = 0
    for tensor in chain.from_iterable(reader.tensors for reader in readers):
        part, _, rest = tensor.name.partition(".")
        number, _, name = rest.partition(".")
        if part == "blk":
            parts.setdefault(int(number), []).append((name, tensor))
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            parameters += int(tensor.n_elements)
    for number, layer in enumerate(layers):
        if layer.source not in parts:
            raise ValueError(f"{source}: there is no layer {layer.source}; it has {len(parts)}")
        own = parts[layer.source]
        zeros = {name for name, _ in own if layer.passes and name.partition(".")[0] in _OUTPUTS}
        if layer.passes and not {"attn_output.weight", "ffn_down.weight"} <= zeros | _experts(zeros):
            raise ValueError(f"{source}: what a layer of the family {family} adds to its input is not known here")
        for name, tensor in own:
            data = np.zeros_like(tensor.data) if name in zeros else tensor.data
            writer.add_tensor(f"blk.{number}.{name}", data, raw_dtype=tensor.tensor_type)
            parameters += int(tensor.n_elements)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=progress)
    writer.close()
    return parameters


def _experts(zeros: set[str]) -> set[str]:
    """A mixture of experts has its projections under another name."""
    return {"ffn_down.weight"} if "ffn_down_exps.weight" in zeros else set()


def count_layers(source: Path) -> int:
    reader = GGUFReader(str(source))
    family = reader.fields["general.architecture"].contents()
    return int(reader.fields[f"{family}.block_count"].contents())
