"""What one process holds of a model on torch: its weights as a network, its KV cache, and what runs the one over the
other. It is the whole of some layers, or one rank's part of them.

transformers' model class of a family, made empty from a spec and filled from our tensors.

The class brings what a family computes (norms, activations, where attention stands). Shape, weights, rotary
frequencies, windows and scales come from the spec, so that all runtimes compute the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adapters.contract import LayerRange, LoadOptions, ModelRefused, NumericalClass
from adapters.decoder.from_safetensors import tensor_names
from adapters.decoder.hf_config import FAMILIES, describe_sizes
from adapters.decoder.limits import refuse_decoder
from adapters.decoder.spec import DecoderSpec
from adapters.process_heap import trim_heap
from adapters.torch_device import attention
from adapters.torch_device.attention import NAME, KvPool, LayerKv
from adapters.torch_device.flex import choose_kernel
from adapters.torch_device.lora import LoraRows, place_loras
from adapters.torch_device.model import DTYPES
from adapters.torch_device.plan import BLOCK_TOKENS, Shapes, list_decode_sizes, shapes_for
from adapters.torch_device.products import Products, widen
from adapters.torch_device.rank_group import RankGroup, join_ranks
from adapters.torch_device.rank_link import RankPlace
from adapters.torch_device.runner import ForwardRunner
from adapters.torch_device.split import split_decoder
from adapters.torch_device.weights import Affine, Float8Rows, Quantised, Stored, read_decoder, read_prepared_tensors
from device_profiles.units import MIB

MakeLinear = Callable[[Any, Any], nn.Module]
# Of matrices that were packed anew, until what that freed is given back. Bounds what a load holds beside the model.
_TRIMMED_BYTES = 64 * MIB
_SLIDING, _FULL = "sliding_attention", "full_attention"
_MODEL_TYPES = {"gemma3": "gemma3_text"}
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}


def build(
    whole: DecoderSpec,
    layers: LayerRange,
    tensors: Iterable[tuple[str, Stored]],
    *,
    dtype: Any,
    device: Any,
    make_linear: MakeLinear,
) -> Any:
    """Return a range of a model's layers in evaluation mode, as a model of that many; products are what
    `make_linear(weight, bias)` makes of them, `weight` as it is stored where it is quantised, else torch's tensor.
    Its embeddings are empty where the range does not begin with the first layer. It has neither last norm nor output
    layer where the range does not end with the last.

    Raises ModelRefused for what the family's class has no words for, torch's errors when memory runs out.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = whole.keep_layers(layers)
    refuse_decoder("torch_device", spec)
    try:
        config = AutoConfig.for_model(_MODEL_TYPES.get(spec.family, spec.family), **_config(spec))
    except StrictDataclassError as error:
        why = f"a {spec.family} of this shape is not supported on torch: {error.__cause__ or error}"
        raise ModelRefused(f"{why} Take another runtime for it (adapter).") from error
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
    names = tensor_names(spec)
    offset = any(family.name == spec.family and family.unit_offset_norms for family in FAMILIES.values())
    quantised: dict[str, Quantised] = {}
    for canonical, tensor in tensors:
        name = names[canonical][0]
        if isinstance(tensor, (Affine, Float8Rows)):
            quantised[name] = tensor
            if canonical != "embedding":
                continue  # a product over it is all that is asked for
        exact = offset and canonical.endswith("norm")  # a norm of 1 + w: computed in float32, and w is small
        value = widen(tensor, torch.float32 if exact else dtype, device)
        _set_parameter(model, name, value - 1.0 if exact else value)
    if spec.tied_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
        if names["embedding"][0] in quantised:
            quantised["lm_head.weight"] = quantised[names["embedding"][0]]
    if layers.end < whole.layers:
        model.model.norm = model.lm_head = nn.Identity()
    _set_buffers(model, spec, device)
    _replace_linears(model, quantised, make_linear)
    return model.eval().requires_grad_(False)


def _config(spec: DecoderSpec) -> dict[str, Any]:
    return {
        **describe_sizes(spec),
        "hidden_act": _ACTIVATIONS[spec.activation],
        "hidden_activation": _ACTIVATIONS[spec.activation],
        "sliding_window": max(spec.windows) or None,
        "layer_types": [_SLIDING if window else _FULL for window in spec.windows],
        "attn_logit_softcapping": spec.attention_softcap or None,
        "final_logit_softcapping": spec.logit_softcap or None,
        "pad_token_id": None,
    }


def _set_parameter(model: Any, name: str, value: Any) -> None:
    place, _, attribute = name.rpartition(".")
    module = model.get_submodule(place)
    setattr(module, attribute, nn.Parameter(value, requires_grad=False))


def _set_buffers(model: Any, spec: DecoderSpec, device: Any) -> None:
    """Give what is in no file its values: rotary frequencies, by kind of layer where they differ, and scales."""
    for layer in model.model.layers:
        layer.self_attn.scaling = spec.query_scale
    embedding, rotary = model.model.embed_tokens, model.model.rotary_emb
    if hasattr(embedding, "embed_scale"):
        embedding.embed_scale = torch.tensor(spec.embedding_scale, device=device)
    for name, _ in list(rotary.named_buffers(recurse=False)):
        kind = name.removesuffix("inv_freq").removesuffix("original_").rstrip("_")
        first = next((i for i, window in enumerate(spec.windows) if kind == (_SLIDING if window else _FULL)), 0)
        rope = spec.ropes[first]
        setattr(rotary, name, torch.tensor(rope.inverse_frequencies, dtype=torch.float32, device=device))
        setattr(rotary, f"{kind}_attention_scaling" if kind else "attention_scaling", rope.magnitude)


def _replace_linears(model: Any, quantised: dict[str, Quantised], make_linear: MakeLinear) -> None:
    packed_bytes = 0
    # Without the products themselves: who holds one keeps its weight beside the packed one.
    parents = [named for named in model.named_modules() if not isinstance(named[1], nn.Linear)]
    for place, parent in parents:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                weight = quantised.get(f"{place}.{name}.weight".lstrip("."), child.weight.data)
                setattr(parent, name, make_linear(weight, None if child.bias is None else child.bias.data))
                packed_bytes += child.weight.nbytes
                del child, weight
                if packed_bytes >= _TRIMMED_BYTES:
                    packed_bytes = 0
                    trim_heap()
    trim_heap()


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """`products` says how the weights are held; `loras` is told the adapters of rows, where there are some."""

    memory: KvPool
    runner: ForwardRunner
    products: Products
    shapes: Shapes
    loras: LoraRows | None


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
    loras = place_loras(network, options.loras, products.make, dtype, device) if options.loras else None
    if group is not None and part is not None:
        join_ranks(network, part, [len(part.outputs) for part in parts], group)
    kv_heads = len(part.kv_heads) if part is not None else own.kv_heads
    kept = LayerKv(kv_heads, own.head_dim, own.head_dim)
    memory = KvPool([kept] * own.layers, blocks=blocks, block=BLOCK_TOKENS, dtype=dtype, device=device)
    runner = ForwardRunner(
        network,
        memory,
        windows=own.windows,
        device=device,
        kernel=choose_kernel(memory, decoder.heads // decoder.kv_heads),
        last=layers.end == decoder.layers,
        captures=loras is None,
    )
    if group is None and layers.first == 0:  # ranks meet later, and other layers get hidden states
        runner.record_ahead(list_decode_sizes(shapes, most_rows=options.max_batch_rows, slots=options.slots))
    return LoadedPart(memory, runner, products, shapes, loras)
