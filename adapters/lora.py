"""LoRA adapters of a model: two narrow matrices beside a weight, whose product is added to it while it computes
(https://arxiv.org/abs/2106.09685).

Their source is a GGUF file, as llama.cpp's converter of adapters writes it, or a directory of PEFT. Of that a GGUF file
is made for llama.cpp, and torch reads it as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from adapters.content_digest import hash_file
from adapters.contract import LoraFile, ModelRefused
from adapters.gguf_header import GgufHeader, read_header
from adapters.gguf_splits import read_model_header
from adapters.hf_directory import read_all_tensors
from adapters.names import LLAMA_CPP, TRANSFORMERS
from adapters.peft import PEFT_CONFIG, PEFT_WEIGHTS, PeftLora, read_floats, read_peft

_FORMS: Final = f"Give a GGUF file with an adapter, or a directory with {PEFT_CONFIG} and {PEFT_WEIGHTS}."
_CONVERT: Final = "Convert it with llama.cpp's convert_lora_to_gguf.py, and give that file."
_INTERLEAVED: Final = ("llama",)
"""Architectures whose files have the rows of queries and keys in another order than their authors' weights."""
_FAMILIES: Final = (*_INTERLEAVED, "qwen2", "qwen3", "gemma2", "gemma3")
"""Those whose PEFT directories are converted: each weight is one of the author's, in that order or as above."""
_A, _B = ".lora_a", ".lora_b"


def find_lora(source: str, base: Path) -> Path:
    """Return the file or directory that `source` names, where it is relative from `base` on. Raises ModelRefused."""
    if source.startswith("hf:"):
        raise ModelRefused(f"{source}: adapters are not downloaded. {_FORMS}")
    path = (base / Path(source).expanduser()).absolute()
    if path.is_file() or (path / PEFT_CONFIG).is_file():
        return path
    raise ModelRefused(f"{source}: there is no adapter at {path}. {_FORMS}")


def list_lora_runtimes(*, is_directory: bool, loras: Sequence[Path]) -> tuple[str, ...]:
    """Return which runtimes of ours compute with all of these adapters, of a model that is a directory or a GGUF
    file."""
    peft = all(path.is_dir() for path in loras)
    able = {LLAMA_CPP: not is_directory, TRANSFORMERS: peft}
    return tuple(runtime for runtime, can in able.items() if can)


def check_lora(path: Path, model: Path) -> None:
    """Check by the heads of its files that an adapter is one of a model. `model`: its GGUF file, of a split one the
    first, or its directory. Raises ModelRefused."""
    if not model.is_dir():
        _check_for_header(path, read_model_header(model))
        return
    if not path.is_dir():
        raise ModelRefused(f"{path.name}: it is a file, and of a directory's models PEFT's directories are read")
    weights = {name: stored.shape for name, stored in read_all_tensors(model).items()}
    for module, pair in read_peft(path).pairs.items():
        shapes = pair.narrow.shape[::-1], pair.wide.shape[::-1]
        weight = weights.get(f"{module}.weight")
        if weight is not None:  # else it is checked where the library's class has made its modules
            _check_shapes(path.name, module, *shapes, weight[::-1], model.name)


def _check_for_header(path: Path, model: GgufHeader) -> None:
    if path.is_dir():
        lora = read_peft(path)
        names = _name_modules(path, lora, model)
        pairs = {names[module]: (pair.narrow.shape[::-1], pair.wide.shape[::-1]) for module, pair in lora.pairs.items()}
    else:
        pairs = _read_pairs(path, model)
    matrices = {tensor.name: tensor.shape for tensor in model.tensors if len(tensor.shape) == 2}
    for name, (narrow, wide) in pairs.items():
        if name not in matrices:
            raise ModelRefused(f"{path.name}: it changes {name}, and {model.path.name} has no such matrix")
        if name == "token_embd.weight":  # rows are looked up in it: the library wants it the other way round
            raise ModelRefused(f"{path.name}: adapters of the embedding are not served")
        _check_shapes(path.name, name, narrow, wide, matrices[name], model.path.name)


def _read_pairs(path: Path, model: GgufHeader) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the shapes of an adapter's matrices by the weights that they change, inputs first. Raises ModelRefused."""
    header = read_header(path)
    kind, form = header.text("general.type"), header.text("adapter.type")
    if kind != "adapter" or form != "lora":
        raise ModelRefused(f"{path.name}: it is {form or kind or 'a model'}, and no LoRA adapter. {_FORMS}")
    family, ours = header.text("general.architecture"), model.text("general.architecture")
    if family != ours:
        theirs = family or "no architecture"
        raise ModelRefused(f"{path.name}: it is an adapter of {theirs}, and {model.path.name} is {ours}")
    if activation := next((key for key in header.metadata if key.startswith("adapter.alora")), ""):
        raise ModelRefused(f"{path.name}: {activation}: adapters that begin at certain tokens are not served")
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    names = dict.fromkeys(name.removesuffix(_A).removesuffix(_B) for name in shapes)
    if not names:
        raise ModelRefused(f"{path.name}: it has no tensors")
    pairs = {name: (shapes.get(name + _A, ()), shapes.get(name + _B, ())) for name in names}
    for name, (narrow, wide) in pairs.items():
        if len(narrow) != 2 or len(wide) != 2:
            raise ModelRefused(f"{path.name}: {name} has no pair of matrices ({_A} and {_B})")
    return pairs


def _check_shapes(
    where: str, name: str, narrow: tuple[int, ...], wide: tuple[int, ...], weight: tuple[int, ...], model: str
) -> None:
    """Check the shapes of a weight's matrices, inputs first in each."""
    if narrow[1] != wide[0]:
        raise ModelRefused(f"{where}: {name}: its matrices have the ranks {narrow[1]} and {wide[0]}")
    if (narrow[0], wide[1]) != tuple(weight):
        raise ModelRefused(
            f"{where}: {name}: it is for {wide[1]} x {narrow[0]} values, and {model} has {weight[1]} x {weight[0]}"
        )


def open_lora(name: str, source: str, base: Path, model: Path, runtime: str, store: Path) -> LoraFile:
    """Return an adapter as a runtime reads it: its own files, or for llama.cpp a file that is made of them once in the
    directory `store`. `model`: as in `check_lora`. Raises ModelRefused, and OSError where that cannot be written."""
    path = find_lora(source, base)
    check_lora(path, model)
    files = [path / PEFT_CONFIG, path / PEFT_WEIGHTS] if path.is_dir() else [path]
    digest = blake2b("".join(map(hash_file, files)).encode(), digest_size=16).hexdigest()
    if path.is_dir() and runtime == LLAMA_CPP:
        made = store / f"lora-{digest}.gguf"
        if not made.exists():
            draft = made.with_name(f".{made.name}.{os.getpid()}")
            _write_gguf(path, read_model_header(model), draft)
            draft.replace(made)
        path = made
    return LoraFile(name, str(path), digest)


def _name_modules(directory: Path, lora: PeftLora, model: GgufHeader) -> dict[str, str]:
    """Return the model's names of the weights that an adapter changes, by their modules. Raises ModelRefused."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    family = model.text("general.architecture") or ""
    if family not in _FAMILIES:
        raise ModelRefused(f"{directory.name}: PEFT's adapters of {family} are not read here. {_CONVERT}")
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == family)
    names = get_tensor_name_map(arch, model.integer(f"{family}.block_count") or 0)
    named = {module: names.get_name(f"{module}.weight", try_suffixes=(".weight",)) for module in lora.pairs}
    if strange := next((module for module, name in named.items() if name is None), ""):
        raise ModelRefused(f"{directory.name}: {strange} is no weight of {family}. {_CONVERT}")
    return named


def _write_gguf(directory: Path, model: GgufHeader, target: Path) -> None:
    from gguf import GGUFWriter

    lora = read_peft(directory)
    writer = GGUFWriter(str(target), model.text("general.architecture") or "")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", lora.alpha)
    for name, values in _list_matrices(directory, lora, model):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _list_matrices(directory: Path, lora: PeftLora, model: GgufHeader) -> Iterator[tuple[str, NDArray[np.float32]]]:
    family = model.text("general.architecture") or ""
    heads = model.integer(f"{family}.attention.head_count") or 1
    counts = {"attn_q": heads, "attn_k": model.integer(f"{family}.attention.head_count_kv") or heads}
    for module, name in _name_modules(directory, lora, model).items():
        pair = lora.pairs[module]
        outputs = read_floats(pair.wide)
        count = counts.get(name.split(".")[-2], 0) if family in _INTERLEAVED else 0
        if count:  # from halves of each head to pairs
            halves = outputs.reshape(count, 2, -1, outputs.shape[1])
            outputs = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(outputs.shape)
        yield name + _A, read_floats(pair.narrow)
        yield name + _B, outputs
