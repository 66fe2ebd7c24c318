"""LoRA adapters of a model: two narrow matrices beside a weight, whose product is added to it while it computes.

Their source is a GGUF file, as llama.cpp's `convert_lora_to_gguf.py` writes it, or a directory of PEFT with
`adapter_config.json` and `adapter_model.safetensors`, of which a GGUF file is made (https://arxiv.org/abs/2106.09685).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from adapters.content_digest import hash_file
from adapters.contract import LoraFile, ModelRefused
from adapters.gguf_header import GgufHeader, GgufTensor, read_header
from adapters.safetensors_file import Stored, read_tensors

PEFT_CONFIG: Final = "adapter_config.json"
PEFT_WEIGHTS: Final = "adapter_model.safetensors"
_FORMS: Final = f"Give a GGUF file with an adapter, or a directory with {PEFT_CONFIG} and {PEFT_WEIGHTS}."
_CONVERT: Final = "Convert it with llama.cpp's convert_lora_to_gguf.py, and give that file."
_INTERLEAVED: Final = ("llama",)
"""Architectures whose files have the rows of queries and keys in another order than their authors' weights."""
_FAMILIES: Final = (*_INTERLEAVED, "qwen2", "qwen3", "gemma2", "gemma3")
"""Those whose PEFT directories are read: every weight is one of the author's, in the author's order or the above."""
_PEFT_PREFIX: Final = "base_model.model."
_A, _B = ".lora_a", ".lora_b"
_CHANGES: Final = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "trainable_token_indices")
"""Keys of PEFT's that make more of an adapter than one pair of matrices of one scale for each weight."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """The matrices of one weight: `a` of shape (rank, inputs), `b` of (outputs, rank)."""

    a: Stored
    b: Stored


def find_lora(source: str, base: Path) -> Path:
    """Return the file or directory that `source` names, where it is relative from `base` on. Raises ModelRefused."""
    if source.startswith("hf:"):
        raise ModelRefused(f"{source}: adapters are not downloaded. {_FORMS}")
    path = (base / Path(source).expanduser()).absolute()
    if path.is_file() or (path / PEFT_CONFIG).is_file():
        return path
    raise ModelRefused(f"{source}: there is no adapter at {path}. {_FORMS}")


def check_lora(path: Path, model: GgufHeader) -> None:
    """Check by the heads of its files that an adapter is one of this model. Raises ModelRefused."""
    if path.is_dir():
        _read_peft(path, model)
        return
    header = read_header(path)
    kind, form = header.text("general.type"), header.text("adapter.type")
    if kind != "adapter" or form != "lora":
        raise ModelRefused(f"{path.name}: it is {form or kind or 'a model'}, and no LoRA adapter. {_FORMS}")
    _check_family(path.name, header.text("general.architecture") or "", model)
    if activation := next((key for key in header.metadata if key.startswith("adapter.alora")), ""):
        raise ModelRefused(f"{path.name}: {activation}: adapters that begin at certain tokens are not served")
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    names = dict.fromkeys(name.removesuffix(_A).removesuffix(_B) for name in shapes)
    if not names:
        raise ModelRefused(f"{path.name}: it has no tensors")
    for name in names:
        if name in shapes:
            raise ModelRefused(f"{path.name}: {name} is no matrix of a LoRA adapter")
        _check_pair(path.name, name, shapes.get(name + _A), shapes.get(name + _B), model)


def _check_family(where: str, family: str, model: GgufHeader) -> None:
    ours = model.text("general.architecture") or ""
    if family != ours:
        theirs = family or "no architecture"
        raise ModelRefused(f"{where}: it is an adapter of {theirs}, and {model.path.name} is {ours}")


def _check_pair(where: str, name: str, a: tuple[int, ...] | None, b: tuple[int, ...] | None, model: GgufHeader) -> None:
    """Check the shapes of a weight's matrices, their inputs first as files of GGUF have them."""
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        raise ModelRefused(f"{where}: {name} has no pair of matrices ({_A} and {_B})")
    weight = _find_tensor(name, model)
    if weight is None:
        raise ModelRefused(f"{where}: it changes {name}, and {model.path.name} has no such tensor")
    if a[1] != b[0]:
        raise ModelRefused(f"{where}: {name}: its matrices have the ranks {a[1]} and {b[0]}")
    if name == "token_embd.weight":  # rows are looked up in it: the library wants it the other way round
        raise ModelRefused(f"{where}: adapters of the embedding are not served")
    if (a[0], b[1]) != weight.shape[:2]:
        rows, columns = weight.shape[1], weight.shape[0]
        raise ModelRefused(
            f"{where}: {name}: it is for {b[1]} x {a[0]} values, and {model.path.name} has {rows} x {columns}"
        )


def _find_tensor(name: str, model: GgufHeader) -> GgufTensor | None:
    return next((tensor for tensor in model.tensors if tensor.name == name and len(tensor.shape) == 2), None)


def open_lora(name: str, source: str, base: Path, model: GgufHeader, store: Path) -> LoraFile:
    """Return an adapter as llama.cpp reads it: its own file, or one that is made of it once in the directory `store`.
    Raises ModelRefused, and OSError where that cannot be written."""
    path = find_lora(source, base)
    check_lora(path, model)
    files = [path / PEFT_CONFIG, path / PEFT_WEIGHTS] if path.is_dir() else [path]
    digest = blake2b("".join(map(hash_file, files)).encode(), digest_size=16).hexdigest()
    if path.is_dir():
        made = store / f"lora-{digest}.gguf"
        if not made.exists():
            draft = made.with_name(f".{made.name}.{os.getpid()}")
            _write_gguf(path, model, draft)
            draft.replace(made)
        path = made
    return LoraFile(name, str(path), digest)


def _read_config(directory: Path) -> Mapping[str, Any]:
    where = directory / PEFT_CONFIG
    try:
        config = json.loads(where.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelRefused(f"{where}: it cannot be read ({error})") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ModelRefused(f"{where}: peft_type is not LORA. {_FORMS}")
    if changed := next((key for key in _CHANGES if config.get(key)), ""):
        raise ModelRefused(f"{where}: {changed} is set, and such adapters are not read. Merge it into the model.")
    if config.get("bias", "none") != "none":
        raise ModelRefused(f"{where}: it changes biases, and such adapters are not read. Merge it into the model.")
    return config


def _read_peft(directory: Path, model: GgufHeader) -> tuple[dict[str, _Pair], float]:
    """Return the matrices of a PEFT directory by the model's names of the weights, and what the library divides by
    their rank to scale their product. Raises ModelRefused."""
    config, pairs = _read_config(directory), _read_pairs(directory, model)
    for name, pair in pairs.items():
        _check_pair(directory.name, name, pair.a.shape[::-1], pair.b.shape[::-1], model)
    alpha, rank = config.get("lora_alpha"), config.get("r")
    if not isinstance(alpha, int | float) or not isinstance(rank, int) or not alpha or rank < 1:
        raise ModelRefused(f"{directory / PEFT_CONFIG}: lora_alpha {alpha!r} and r {rank!r} are no scale")
    if other := next((name for name, pair in pairs.items() if pair.a.shape[0] != rank), ""):
        raise ModelRefused(f"{directory.name}: {other} has the rank {pairs[other].a.shape[0]}, and r is {rank}")
    return pairs, float(alpha) * (math.sqrt(rank) if config.get("use_rslora") else 1.0)


def _read_pairs(directory: Path, model: GgufHeader) -> dict[str, _Pair]:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    family = model.text("general.architecture") or ""
    if family not in _FAMILIES:
        raise ModelRefused(f"{directory.name}: PEFT's adapters of {family} are not read here. {_CONVERT}")
    if not (directory / PEFT_WEIGHTS).is_file():
        raise ModelRefused(f"{directory.name}: there is no {PEFT_WEIGHTS} in it. {_FORMS}")
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == family)
    names = get_tensor_name_map(arch, model.integer(f"{family}.block_count") or 0)
    sides: dict[str, dict[str, Stored]] = {}
    for key, stored in read_tensors(directory / PEFT_WEIGHTS).items():
        module, _, side = key.removeprefix(_PEFT_PREFIX).removesuffix(".weight").rpartition(".lora_")
        name = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        if name is None or side not in ("A", "B"):
            raise ModelRefused(f"{directory.name}: {key} is of no weight of {family}. {_CONVERT}")
        sides.setdefault(name, {})[side] = stored
    if alone := next((name for name, pair in sides.items() if len(pair) < 2), ""):
        raise ModelRefused(f"{directory.name}: {alone} has no pair of matrices (lora_A and lora_B)")
    if not sides:
        raise ModelRefused(f"{directory.name}: {PEFT_WEIGHTS} has no tensors")
    return {name: _Pair(pair["A"], pair["B"]) for name, pair in sides.items()}


def _write_gguf(directory: Path, model: GgufHeader, target: Path) -> None:
    from gguf import GGUFWriter

    pairs, alpha = _read_peft(directory, model)
    family = model.text("general.architecture") or ""
    writer = GGUFWriter(str(target), family)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, values in _list_matrices(pairs, family, model):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _list_matrices(
    pairs: Mapping[str, _Pair], family: str, model: GgufHeader
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    heads = model.integer(f"{family}.attention.head_count") or 1
    counts = {"attn_q": heads, "attn_k": model.integer(f"{family}.attention.head_count_kv") or heads}
    for name, pair in pairs.items():
        outputs = _read_floats(pair.b)
        count = counts.get(name.split(".")[-2], 0) if family in _INTERLEAVED else 0
        if count:  # from halves of each head to pairs
            halves = outputs.reshape(count, 2, -1, outputs.shape[1])
            outputs = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(outputs.shape)
        yield name + _A, _read_floats(pair.a)
        yield name + _B, outputs


def _read_floats(stored: Stored) -> NDArray[np.float32]:
    values = stored.values()
    if values.dtype == np.uint16:  # bfloat16: the upper half of a float32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(values, np.float32)
