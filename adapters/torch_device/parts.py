"""What one process holds of a model on torch: its weights as a network, its KV cache, and what runs the one over the
other. It is the whole of some layers, or one rank's part of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from adapters.contract import LayerRange, LoadOptions, NumericalClass
from adapters.torch_device import attention
from adapters.torch_device.attention import KvPool
from adapters.torch_device.decoder import build
from adapters.torch_device.model import BLOCK_TOKENS, DTYPES, shapes_for
from adapters.torch_device.plan import Shapes
from adapters.torch_device.products import Products
from adapters.torch_device.rank_group import RankGroup, join_ranks
from adapters.torch_device.rank_link import RankPlace
from adapters.torch_device.runner import ForwardRunner
from adapters.torch_device.split import split_decoder
from adapters.torch_device.weights import read_decoder, read_prepared_tensors


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """`products` says how the weights are held."""

    memory: KvPool
    runner: ForwardRunner
    products: Products
    shapes: Shapes


def load_part(
    prepared: Path,
    options: LoadOptions,
    chosen: NumericalClass,
    layers: LayerRange,
    blocks: int,
    place: RankPlace,
    group: RankGroup | None = None,
) -> LoadedPart:
    """Load some layers, or a rank's part of them, with a KV cache of so many blocks. Raises Unsupported, ModelRefused,
    torch's errors when memory runs out."""
    device = torch.device(place.device.lower())
    if place.threads:
        torch.set_num_threads(place.threads)
    decoder = read_decoder(prepared)
    own = decoder.keep_layers(layers)
    parts = split_decoder(decoder, group.ranks) if group is not None else ()
    part = parts[group.rank] if group is not None else None
    dtype = DTYPES[chosen.activations]
    shapes = shapes_for(device.type, options.exactness, chosen.fixed_width, decoder.heads // decoder.kv_heads)
    products = Products(device, chosen.activations, shapes.product_tile)
    attention.register()
    tensors = read_prepared_tensors(prepared, decoder, layers, part)
    network = build(decoder, layers, tensors, dtype=dtype, device=device, make_linear=products.make)
    if group is not None and part is not None:
        join_ranks(network, part, [len(part.outputs) for part in parts], group)
    memory = KvPool(
        layers=own.layers,
        blocks=blocks,
        block=BLOCK_TOKENS,
        kv_heads=len(part.kv_heads) if part is not None else own.kv_heads,
        head_dim=own.head_dim,
        dtype=dtype,
        device=device,
    )
    runner = ForwardRunner(
        network,
        memory,
        block=BLOCK_TOKENS,
        scratch_block=blocks,
        windows=own.windows,
        device=device,
        last=layers.end == decoder.layers,
    )
    return LoadedPart(memory, runner, products, shapes)
