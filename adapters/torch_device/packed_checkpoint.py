"""Checkpoints of GPTQ and AWQ on a processor: their tensors as transformers' classes have them without quantisation.

No kernel that transformers has for them there keeps a row's bits among other rows (ADR 0143), and products of ours do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from adapters.hf_directory import weight_names
from adapters.hf_facts import read_quantisation
from adapters.packed_weights import PACKED_WEIGHT, list_parts, read_packed_form


def unpack_checkpoint(prepared: Path, config: Mapping[str, Any], dtype: Any, where: str) -> dict[str, Any] | None:
    """Return a prepared model's tensors by their names, those that are packed in `dtype`; None where its form packs
    none. `where` names it. Raises ModelRefused."""
    form = read_packed_form(read_quantisation(config, where), where)
    if form is None:
        return None
    tensors: dict[str, Any] = {}
    for weights in weight_names(prepared, {path.name for path in prepared.iterdir()}):
        with safe_open(prepared / weights, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- it is no mapping
    for packed in [name for name in tensors if name.endswith(PACKED_WEIGHT)]:
        parts = list_parts(tensors, packed)
        layer = packed.removesuffix(PACKED_WEIGHT)
        words = {end: tensors.pop(name) for end, name in parts.items()}
        if "scales" in words:
            words["scales"] = words["scales"].float()  # numpy knows no bfloat16
        weight = form.unpack(f"{where}: {layer}", {end: values.numpy() for end, values in words.items()})
        tensors[f"{layer}.weight"] = torch.from_numpy(weight).to(dtype)
    return tensors
