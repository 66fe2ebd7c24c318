"""Any decoder of transformers from its own directory: the library's class and loading, over our paged KV cache.

A model's repository is data: its config.json and its safetensors are read, and no code of it ever runs
(`trust_remote_code=False`). The class is asked once, with a few rows, what each layer keeps of a position and by which
rule it looks at others; what cannot be computed over pages is refused then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, Cache
from transformers import __version__ as version
from transformers.utils import logging as library_logging

from adapters.contract import DeviceLost, LayerRange, LoadOptions, ModelRefused, NumericalClass, Progress, Unsupported
from adapters.decoder.hf_config import CONFIG_FILE
from adapters.hf_directory import INDEX_FILE, WHOLE_FILE, read_all_tensors, read_json, title, weight_names
from adapters.hf_facts import (
    BITSANDBYTES,
    GGUF_WAY_OUT,
    LOADED_WHOLE,
    OTHER_HALVES,
    WIDENED,
    read_directory_facts,
    read_quantised_form,
    refuse_form,
)
from adapters.packed_weights import PACKED_FORMS
from adapters.prepared_facts import model_spec, read_facts, write_facts
from adapters.tokenizer_hf import vocabulary_texts
from adapters.torch_device import attention
from adapters.torch_device.attention import MASKED, KvPool, LayerKv, Rule, attending
from adapters.torch_device.class_products import ClassProducts
from adapters.torch_device.failures import classify_torch_failure
from adapters.torch_device.flex import choose_kernel
from adapters.torch_device.lora import place_loras
from adapters.torch_device.model import DTYPES, TorchModel, count_blocks
from adapters.torch_device.packed_checkpoint import unpack_checkpoint
from adapters.torch_device.plan import BLOCK_TOKENS, list_decode_sizes, shapes_for
from adapters.torch_device.products import Products
from adapters.torch_device.rank_link import RankPlace
from adapters.torch_device.runner import ForwardRunner
from device_profiles.workload import vocabulary_fingerprint

LOADER: Final = "transformers"
"""The fact of a prepared model that says who loads it."""
_CODE: Final = "auto_map"
"""The key of config.json that points at code of a model's repository."""
_OF_HALVES: Final = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
}
"""How files of several halves name what the class of the one that says tokens names otherwise."""
_PROBED = 4  # rows of the forward that a class is asked with: more than one of each kind of shape. Not tuned.
_HARMLESS = frozenset(
    {
        *("dropout", "sliding_window", "is_causal", "position_ids", "cache_position", "use_cache", "past_key_values"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "token_type_ids"),
    }
)
"""What classes tell their attention that changes nothing here: windows are in the rule, too."""
_COMPUTED = frozenset({"scaling", "softcap", "s_aux"})


def prepare_directory(source: Path, target: Path, progress: Progress) -> None:
    """Write a model's facts, its config without what points at code, and links to its weights. Raises ModelRefused."""
    config, where = read_json(source / CONFIG_FILE), title(source)
    facts = read_directory_facts(config, read_all_tensors(source), where)
    config.pop(_CODE, None)
    config = _choose_half(config, has_head=facts.head_elements > 0)
    (target / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    _read_config(target, where)
    names = {path.name for path in source.iterdir()}
    weights = weight_names(source, names)
    for name in weights:
        (target / name).symlink_to((source / name).resolve())
    if weights != (WHOLE_FILE,):
        (target / INDEX_FILE).write_bytes((source / INDEX_FILE).read_bytes())
    write_facts(
        target,
        {
            "architecture": facts.family,
            "name": where,
            "loader": LOADER,
            "layers": facts.layers,
            "context_length": facts.context_length,
            "vocabulary_size": facts.vocabulary_size,
            "vocabulary_fingerprint": vocabulary_fingerprint(vocabulary_texts(source, facts.vocabulary_size)),
            "weights": facts.stored,
        },
    )
    progress(f"look at {where}", 1.0)


def _choose_half(config: dict[str, Any], *, has_head: bool) -> dict[str, Any]:
    """Return the config of the half that says tokens where a model has several and the library a class for that alone:
    what sees and hears is not loaded then. `has_head`: the files have an output layer, which the whole's config says
    nothing reliable of."""
    half = config.get("text_config")
    if not isinstance(half, dict) or not _is_decoder(half.get("model_type")):
        return config
    outer = {key: config[key] for key in ("architectures", "quantization_config") if key in config}
    chosen = {**half, **outer, "tie_word_embeddings": not has_head}
    return {key: value for key, value in chosen.items() if key != _CODE}


def _is_decoder(kind: object) -> bool:
    return kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING


def _read_config(prepared: Path, where: str) -> Any:
    """Return transformers' own config. Raises ModelRefused where the installed version knows no such decoder."""
    kind = read_json(prepared / CONFIG_FILE).get("model_type")
    if not _is_decoder(kind):
        raise ModelRefused(
            f"{where}: transformers {version}, which is installed, has no decoder for model_type {kind!r}, and code of "
            "a model's repository is never run. Install a version that has it, or choose another model."
        )
    network = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]]
    if getattr(network, "_is_stateful", False):
        raise ModelRefused(f"{where}: {network.__name__} keeps a state that is no KV cache. {GGUF_WAY_OUT}")
    try:
        with _quietly():
            return AutoConfig.from_pretrained(prepared, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever the family's own checks raise
        raise ModelRefused(f"{where}: {CONFIG_FILE}: {_first_line(error)}. Choose another model.") from error


def load_network(prepared: Path, dtype: Any, device: Any, implementation: str) -> Any:
    """Return the class of a prepared model with its weights on a device, with an implementation of attention.

    Raises ModelRefused, which names the package, the tensor or the device that is missing, and torch's errors when
    memory runs out.
    """
    where = read_facts(prepared)["name"]
    config = read_json(prepared / CONFIG_FILE)
    form = read_quantised_form(config, where)
    refuse_form(form, device.type, where)
    settings = _read_config(prepared, where)
    widens = form in WIDENED and device.type == "cpu"
    unpacked = unpack_checkpoint(prepared, config, dtype, where) if widens and form in PACKED_FORMS else None
    if unpacked is not None:
        del settings.quantization_config
    elif widens:
        settings.quantization_config = {**settings.quantization_config, "dequantize": True}
    with _quietly():
        try:
            network, loading = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)].from_pretrained(
                None if unpacked is not None else prepared,
                state_dict=unpacked,
                config=settings,
                dtype=dtype,
                attn_implementation=implementation,
                experts_implementation="eager",
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                key_mapping=_OF_HALVES,
                # Integrations pick their kernels by where the weights come to lie; this needs accelerate, as they do.
                device_map={"": device} if form and device.type != "cpu" else None,
            )
            if widens and form == BITSANDBYTES:
                network = network.dequantize(dtype)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever its integrations raise: of packages, devices, shapes
            why = f"transformers cannot load it ({type(error).__name__}: {_first_line(error)})"
            if MASKED in error.args:
                why = "its class looks up its attention among its own"
            raise ModelRefused(f"{where}: {why}. Choose another model, or another runtime for it.") from error
    lost = sorted(map(str, (*loading["missing_keys"], *loading["mismatched_keys"])))
    left = sorted(name for name in loading["unexpected_keys"] if not form and not OTHER_HALVES.search(name))
    if lost or left:
        what = "has no fit tensor" if lost else "has a tensor that the class does not know,"
        raise ModelRefused(f"{where}: it {what} {(lost or left)[0]}. The files do not belong together.")
    return (network if form else network.to(device)).eval().requires_grad_(False)


def load_decoder(
    prepared: Path, options: LoadOptions, chosen: NumericalClass, layers: LayerRange, places: Sequence[RankPlace]
) -> TorchModel:
    """Load a prepared model, whole. Raises ModelRefused, Unsupported, DeviceLost."""
    facts = read_facts(prepared)
    where, whole = facts["name"], LayerRange(0, facts["layers"])
    if len(places) > 1 or layers != whole:
        raise Unsupported(f"{where}: {LOADED_WHOLE}; leave out tensor_parallel and shards")
    place = places[0]
    device, dtype = torch.device(place.device.lower()), DTYPES[chosen.activations]
    if place.threads:
        torch.set_num_threads(place.threads)
    attention.register()
    try:
        network = load_network(prepared, dtype, device, MASKED)
        products = Products(device, chosen.activations, 0)
        shapes = shapes_for(device.type, options.exactness, chosen.fixed_width)
        own = ClassProducts(products, shapes)
        own.place(network)
        probe = _probe(network, device, where, facts["layers"])
        own.pack()
        loras = place_loras(network, options.loras, own.make, dtype, device) if options.loras else None
        kept = [probe.layers[layer] for layer in range(facts["layers"])]
        token_bytes = sum(layer.elements for layer in kept) * dtype.itemsize
        blocks = count_blocks(options, token_bytes)
        memory = KvPool(kept, blocks=blocks, block=BLOCK_TOKENS, dtype=dtype, device=device)
        runner = ForwardRunner(
            network,
            memory,
            windows=(),
            device=device,
            kernel=choose_kernel(memory, probe.heads_per_key),
            past=_NoPast(),
            captures=not own.has_experts and not _looks_at_lengths(network.config) and loras is None,
        )
        runner.record_ahead(list_decode_sizes(shapes, most_rows=options.max_batch_rows, slots=options.slots))
    except (RuntimeError, MemoryError) as error:
        raise classify_torch_failure(error) from error
    form = read_quantised_form(read_json(prepared / CONFIG_FILE), where)
    widened = form in WIDENED and device.type == "cpu"
    weights = f"{form}, held in {chosen.activations}" if widened else form
    return TorchModel(
        memory,
        runner,
        model_spec(facts, token_bytes),
        options,
        shapes_for(device.type, options.exactness, chosen.fixed_width, probe.heads_per_key),
        weights=weights or products.describe_storage(facts["weights"]),
        numerical_class=chosen,
        layers=layers,
        loras=loras,
    )


def _looks_at_lengths(config: Any) -> bool:
    """Return whether a class chooses its rotary frequencies by the positions of a forward, which a graph cannot."""
    return any(kind in json.dumps(config.to_dict(), default=str) for kind in ('"longrope"', '"dynamic"'))


class _NoPast(Cache):  # type: ignore[misc]  # transformers is untyped here
    """What a class is told of earlier tokens: nothing, as our attention reads them itself. That there is a cache keeps
    classes from taking the rows of several sequences for one text."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key: Any, value: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Return the new rows' own."""
        return key, value

    def get_seq_length(self, *_: Any) -> int:
        """See transformers.Cache."""
        return 0

    def get_query_offset(self, *_: Any) -> int:
        """See transformers.Cache."""
        return 0

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        """See transformers.Cache."""
        return query_length, 0


@dataclass(slots=True)
class _Probe:
    """Stands behind the attention of a forward and notes what each layer keeps."""

    layers: dict[int, LayerKv] = field(default_factory=dict)
    keys: list[Any] = field(default_factory=list)
    heads_per_key: int = 1

    def attend(self, module: Any, query: Any, key: Any, value: Any, rule: Rule | None, **options: Any) -> Any:
        """Return zeros, (1, N, H, D). Raises ModelRefused for what is not computed over pages."""
        given = {name for name, value in options.items() if value is not None}
        if strange := sorted(given - _HARMLESS - _COMPUTED):
            raise ModelRefused(f"its attention takes {strange[0]}")
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.layers:
            raise ModelRefused("a layer attends more than once, or does not say which layer it is")
        if rule is None or getattr(module, "is_causal", True) is False or not _is_causal(rule, query.device):
            raise ModelRefused("it looks at tokens behind the one that it is at, or has no mask")
        heads, kv_heads = query.shape[1], key.shape[1]
        if key.shape[2] != query.shape[2] or heads % kv_heads:
            raise ModelRefused("a layer keeps something else than a key and a value of each token")
        self.layers[layer] = LayerKv(kv_heads, key.shape[3], value.shape[3])
        self.keys.append(key)
        self.heads_per_key = max(self.heads_per_key, heads // kv_heads)
        return torch.zeros((1, query.shape[2], heads, value.shape[3]), dtype=query.dtype, device=query.device)


def _is_causal(rule: Rule, device: Any) -> bool:
    places = torch.arange(_PROBED, device=device)
    seen = rule(0, 0, places[:, None], places) & (places > places[:, None])
    return not bool(seen.any())


def _probe(network: Any, device: Any, where: str, layers: int) -> _Probe:
    """Return what the layers of a class keep, seen in a forward of a few rows. Raises ModelRefused."""
    probe, elsewhere = _Probe(), _Probe()
    wanted, tokens = torch.tensor([_PROBED - 1, 1], device=device), torch.arange(_PROBED, device=device)[None]
    shared = {"use_cache": False, "past_key_values": _NoPast(), "logits_to_keep": wanted}
    name = type(network).__name__
    try:
        with torch.inference_mode(), attending(probe):
            rows = network(input_ids=tokens, position_ids=tokens, **shared).logits.shape[1]
        with torch.inference_mode(), attending(elsewhere):
            network(input_ids=tokens, position_ids=tokens + 1, **shared)
    except (torch.OutOfMemoryError, DeviceLost):
        raise
    except Exception as error:  # of any class there is
        what = "" if isinstance(error, ModelRefused) else "it does what no interface of transformers tells: "
        why = f"{name} is not run over a paged KV cache: {what}{_first_line(error)}"
        raise ModelRefused(f"{where}: {why}. Choose another model, or another runtime for it.") from error
    if sorted(probe.layers) != list(range(layers)) or rows != len(wanted):
        what = f"{len(probe.layers)} of {layers} layers attend by transformers' attention interface"
        raise ModelRefused(f"{where}: {name} is not run over a paged KV cache: {what}. Choose another model.")
    if all(torch.equal(key, other) for key, other in zip(probe.keys, elsewhere.keys, strict=True)):
        what = "its keys do not follow the positions that it is given"
        raise ModelRefused(f"{where}: {name} is not run over a paged KV cache: {what}. Choose another model.")
    return probe


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep the library from writing between our lines: what fails is told here."""
    before, shown = library_logging.get_verbosity(), library_logging.is_progress_bar_enabled()
    library_logging.set_verbosity(library_logging.CRITICAL)
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        library_logging.set_verbosity(before)
        if shown:
            library_logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ if error.__cause__ is not None else error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0].rstrip(".")
