"""A Hugging Face model directory as a decoder: its shape, and its tensors by canonical name, mapped lazily."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapters.contract import ModelRefused
from adapters.decoder.finite import demand_finite_tensor
from adapters.decoder.hf_config import read_spec
from adapters.decoder.spec import DecoderSpec, Dense, OnRead, ignore_read
from adapters.safetensors_file import KINDS, Stored

_LABELS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
_PREFIXES = ("model.", "language_model.model.", "model.language_model.")
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")
_OTHER_HALVES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_DRAFT_TO_TARGET, _TARGET_TO_DRAFT = (
    "d2t",
    "t2d",
)  # EAGLE-3's names; the second one says nothing that the first does not

_IN_LAYER = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
_POST_NORMS = {
    "mlp_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


class SafetensorsWeights:
    """`adapters.decoder.spec.Weights` over mapped safetensors files."""

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, Stored],
        where: str,
        *,
        heads_only: bool = False,
        on_read: OnRead = ignore_read,
    ) -> None:
        """Match `tensors` (as the files name them) with what `config` describes; `heads_only`: their values are not
        here yet, and nothing looks at them. `on_read` hears of what is read.

        Raises ModelRefused when one is missing, has another shape, or is left over: a tensor that nobody reads
        would mean that the model computes something else than we do.
        """
        self._where, self._on_read = where, on_read
        self._family, spec = read_spec(config, where)
        if spec.tied_embeddings:
            spec = _untie_where_heads_differ(tensors, spec, where, heads_only=heads_only)
        names = {
            canonical: _first(tensors, choices, where)
            for canonical, choices in tensor_names(spec, _prefix(tensors, where)).items()
        }
        self._tensors = {canonical: tensors[name] for canonical, name in names.items()}
        self._check_shapes(spec)
        self.output_ids = _output_ids(tensors, spec, where, heads_only=heads_only)
        _refuse_leftovers(set(tensors) - set(names.values()), spec, where)
        self.spec = self._round_embedding_scale(spec)

    @property
    def label(self) -> str:
        """The weight format for people, by the format of the layers' matrices."""
        kinds = sorted(
            {
                _LABELS.get(stored.kind, stored.kind.lower())
                for stored in self._tensors.values()
                if len(stored.shape) > 1
            }
        )
        return "+".join(kinds)

    def tensor(self, name: str) -> Dense:
        stored = self._tensors.get(name)
        if stored is None:
            raise ModelRefused(f"{self._where}: it has no tensor {name}")
        dense = Dense(stored.values(), bfloat16=stored.kind == "BF16")
        try:
            demand_finite_tensor(dense)
        except ModelRefused as error:
            raise ModelRefused(
                f"{stored.path.name}: the tensor {stored.name}: {error}. Export the model again, or choose another one."
            ) from error
        self._on_read(stored.name, dense.values.nbytes)
        if self._family.unit_offset_norms and name.rpartition(".")[2].endswith("norm"):
            return Dense(np.float32(1.0) + dense.float32())
        return dense

    def _check_shapes(self, spec: DecoderSpec) -> None:
        for name, stored in self._tensors.items():
            expected = spec.shape_of(name)
            if stored.kind not in KINDS:
                raise ModelRefused(
                    f"{stored.path.name}: {stored.name} is of the type {stored.kind}; supported are "
                    f"{', '.join(KINDS)}. Choose the model's bf16, f16 or f32 weights."
                )
            if stored.shape != expected:
                raise ModelRefused(
                    f"{stored.path.name}: {stored.name} has the shape {list(stored.shape)} and config.json means "
                    f"{list(expected)}. The files do not belong together."
                )

    def _round_embedding_scale(self, spec: DecoderSpec) -> DecoderSpec:
        """Gemma multiplies embeddings with sqrt(hidden) in the number format of the embedding (modeling_gemma.py)."""
        if spec.embedding_scale == 1.0:
            return spec
        kind = self._tensors["embedding"].kind
        scale = np.float32(spec.embedding_scale)
        if kind == "BF16":
            scale = Dense(round_to_bfloat16(scale.reshape(1)), bfloat16=True).float32()[0]
        elif kind == "F16":
            scale = np.float32(np.float16(scale))
        return replace(spec, embedding_scale=float(scale))


def round_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return bfloat16 bit patterns, rounded to nearest even. NaN is not expected."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _untie_where_heads_differ(
    tensors: Mapping[str, Stored], spec: DecoderSpec, where: str, *, heads_only: bool
) -> DecoderSpec:
    """Return the spec with an output layer of its own where the files have one that is not the embedding: the weights
    are right then, and tie_word_embeddings is not (transformers decides so, too)."""
    name = next((name for name in _HEADS if name in tensors), None)
    if name is None:
        return spec
    head, embedding = tensors[name], tensors[f"{_prefix(tensors, where)}embed_tokens.weight"]
    alike = (head.kind, head.shape) == (embedding.kind, embedding.shape)
    if alike and (heads_only or head.kind not in KINDS or head.find_difference(embedding) is None):
        return spec
    return replace(spec, tied_embeddings=False)


def list_shape_values(tensors: Mapping[str, Stored], where: str) -> list[tuple[Path, int, int]]:
    """Return the values that are looked at when a model is opened: file, first byte and count of bytes. They are what
    tells an output layer from the embedding, and a draft's table of outputs. Raises ModelRefused."""
    places = []
    table = tensors.get(_DRAFT_TO_TARGET)
    if table is not None:
        places.append(table.locate())
    head = next((tensors[name] for name in _HEADS if name in tensors), None)
    if head is None or head.kind not in KINDS:
        return places
    try:
        embedding = tensors[f"{_prefix(tensors, where)}embed_tokens.weight"]
    except ModelRefused:  # of a family that is not built in, which calls it something else
        return places
    if (head.kind, head.shape) != (embedding.kind, embedding.shape):
        return places
    at = head.find_difference(embedding)
    return places if at is None else [*places, head.locate(at, 1), embedding.locate(at, 1)]


def _output_ids(tensors: Mapping[str, Stored], spec: DecoderSpec, where: str, *, heads_only: bool) -> tuple[int, ...]:
    """Return the token of each output: EAGLE-3's table holds how far it lies above the output's own number."""
    if not spec.draft_outputs:
        return ()
    stored = tensors.get(_DRAFT_TO_TARGET)
    if stored is None or stored.shape != (spec.draft_outputs,):
        raise ModelRefused(
            f"{where}: it has no tensor {_DRAFT_TO_TARGET} of {spec.draft_outputs} numbers, which say what token each "
            "output of this draft is. Export it again."
        )
    if heads_only:
        return ()
    ids = np.arange(spec.draft_outputs) + stored.integers()
    if ids.min() < 0 or ids.max() >= spec.vocabulary_size or len(np.unique(ids)) != len(ids):
        raise ModelRefused(
            f"{where}: {_DRAFT_TO_TARGET} names tokens that there are not, or one twice. Export it again."
        )
    return tuple(int(token) for token in ids)


def _prefix(tensors: Mapping[str, Stored], where: str) -> str:
    for prefix in _PREFIXES:
        if f"{prefix}embed_tokens.weight" in tensors:
            return prefix
    raise ModelRefused(f"{where}: it has no tensor model.embed_tokens.weight. Download it again.")


def tensor_names(spec: DecoderSpec, prefix: str = _PREFIXES[0]) -> dict[str, tuple[str, ...]]:
    """Return the names that files use for each canonical name, that of transformers' classes first."""
    inside = _IN_LAYER | (_POST_NORMS if spec.post_norms else {})
    whole = {"embedding": (f"{prefix}embed_tokens.weight",), "final_norm": (f"{prefix}norm.weight",), "head": _HEADS}
    names: dict[str, tuple[str, ...]] = {}
    for canonical in spec.list_tensors():
        layer, _, role = canonical.rpartition(".")
        if not layer:
            names[canonical] = whole[role]
            continue
        part, kind = role.removesuffix("_bias"), "bias" if role.endswith("_bias") else "weight"
        names[canonical] = (f"{prefix}layers.{layer}.{inside[part]}.{kind}",)
    return names


def _first(tensors: Mapping[str, Stored], names: Sequence[str], where: str) -> str:
    for name in names:
        if name in tensors:
            return name
    raise ModelRefused(f"{where}: it has no tensor {names[0]}. Download it again.")


def _refuse_leftovers(names: set[str], spec: DecoderSpec, where: str) -> None:
    ignored = _HEADS if spec.tied_embeddings else (_DRAFT_TO_TARGET, _TARGET_TO_DRAFT) if spec.draft_outputs else ()
    left = sorted(
        name
        for name in names
        if name not in ignored and not _IGNORED.search(name) and not name.startswith(_OTHER_HALVES)
    )
    if left:
        raise ModelRefused(
            f"{where}: it has {len(left)} tensors that a {spec.family} model does not have, {left[0]} first. "
            "Choose another model."
        )
