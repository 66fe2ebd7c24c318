"""The bytes of a GGUF model's weights by where llama.cpp's library can put them, read from its header."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from adapters.gguf_header import GgufHeader

_IN_LAYER: Final = re.compile(r"blk\.(\d+)\.")
_OF_HEAD: Final = "output"
_HEAD, _EMBEDDING = "output.weight", "token_embd.weight"


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """`layers`: of each. `head`: of the output head with its norm, `tied` of an embedding that is the head, too: a
    device has a copy of it. `rest`: the embedding, and all that is always in the host's memory."""

    layers: tuple[int, ...]
    head: int
    tied: int
    rest: int


def read_layer_bytes(header: GgufHeader, layers: int) -> LayerBytes:
    """Return them for a model of so many layers; those behind the last, which only draft, are not loaded."""
    sizes, head, tied, rest = [0] * layers, 0, 0, 0
    names = {tensor.name for tensor in header.tensors}
    for tensor in header.tensors:
        match = _IN_LAYER.match(tensor.name)
        if match is not None:
            if int(match[1]) < layers:
                sizes[int(match[1])] += tensor.size
        elif tensor.name.startswith(_OF_HEAD):
            head += tensor.size
        else:
            rest += tensor.size
            tied += tensor.size * (tensor.name == _EMBEDDING and _HEAD not in names)
    return LayerBytes(tuple(sizes), head, tied, rest)
