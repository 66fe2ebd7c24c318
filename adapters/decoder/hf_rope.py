"""The rotary embedding that a config.json describes, wherever its parameters stand in the file.

Both ways of writing are read: `rope_theta` with `rope_scaling` (transformers 4) and `rope_parameters` (5).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapters.decoder.config_reader import ConfigReader
from adapters.decoder.rope import RopeRefused, extend_context, rope_from
from adapters.decoder.spec import Rope

SLIDING = "sliding_attention"


def read_ropes(reader: ConfigReader, family: str, kinds: list[str], head_dim: int) -> tuple[Rope, ...]:
    """Return each layer's rope, by the kinds of the layers. Gemma 3 has one for sliding layers and one for the others.

    Raises ModelRefused, by the key.
    """
    by_kind = {kind: _rope_parameters(reader, family, kind) for kind in sorted(set(kinds))}
    made = {}
    for kind, parameters in by_kind.items():
        try:
            made[kind] = rope_from(parameters, head_dim)
        except RopeRefused as error:
            raise reader.build_refusal(_rope_key(reader), str(error)) from error
    return tuple(made[kind] for kind in kinds)


def _rope_key(reader: ConfigReader) -> str:
    """Return which of the two keys counts where both are there: transformers' order."""
    return "rope_parameters" if reader.get("rope_parameters") and not reader.get("rope_scaling") else "rope_scaling"


def _rope_parameters(reader: ConfigReader, family: str, kind: str) -> dict[str, Any]:
    """Return the parameters of the rope of one kind of layer, with those that stand elsewhere in the file."""
    key = _rope_key(reader)
    given = reader.get(key) or {}
    if not isinstance(given, Mapping):
        raise reader.build_refusal(key, "it must be a mapping")
    parameters = given.get(kind, given)
    if not isinstance(parameters, Mapping):
        raise reader.build_refusal(key, f"{kind} must be a mapping")
    if family == "gemma3" and kind == SLIDING and kind not in given:
        parameters = {"rope_theta": reader.get("rope_local_base_freq")}
    context, original = reader.count("max_position_embeddings"), reader.get("original_max_position_embeddings")
    basis = {
        "rope_theta": reader.number("rope_theta", default=10_000.0),
        "partial_rotary_factor": reader.get("partial_rotary_factor"),
        "original_max_position_embeddings": context,
    }
    rope = basis | dict(parameters) | ({} if original is None else {"original_max_position_embeddings": original})
    if _is_yarn(rope) and rope.get("factor") is None:
        rope["factor"] = context / reader.count("original_max_position_embeddings", default=_whole(rope, context))
    return rope


def _whole(parameters: Mapping[str, Any], default: int) -> int:
    length = parameters["original_max_position_embeddings"]
    return length if isinstance(length, int) and length > 0 else default  # what is none is refused with the rope


def _is_yarn(parameters: Mapping[str, Any]) -> bool:
    return "yarn" in (parameters.get("rope_type"), parameters.get("type"))


def read_context_length(reader: ConfigReader, family: str, kinds: list[str]) -> int:
    """Return how many tokens the model reads: YaRN extends what it was trained with by its factor. Raises
    ModelRefused where that is damage."""
    context = reader.count("max_position_embeddings")
    for kind in set(kinds):
        try:
            context = max(context, extend_context(_rope_parameters(reader, family, kind), context))
        except RopeRefused as error:
            raise reader.build_refusal(_rope_key(reader), str(error)) from error
    return context
