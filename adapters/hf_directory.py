"""A Hugging Face model directory: which of its files count, and whether they are whole.

    config.json                       what is computed (required, but for OpenVINO's form)
    model.safetensors                 the weights, or
    model.safetensors.index.json      which of several safetensors files holds which tensor, or
    openvino_model.xml and .bin       OpenVINO's form: what is computed, and the weights (adapters.ir_facts)
    tokenizer.json                    text to ids (required, but for a draft whose config names its target's vocabulary,
                                      and where OpenVINO's form of it stands in its place)
    genai_config.json, model.onnx     onnxruntime-genai's form, with the weights beside it (adapters.genai_facts)
    openvino_tokenizer.xml and .bin   OpenVINO's form of it, read where there is no other (adapters.tokenizer_ir)
    tokenizer_config.json, generation_config.json, chat_template.jinja     read where they are

Nothing else is opened: no pickle (.bin, .pt), no code of the model's own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from adapters import ir_facts
from adapters.contract import ModelRefused
from adapters.decoder import from_safetensors, hf_config
from adapters.decoder.from_safetensors import SafetensorsWeights
from adapters.decoder.hf_config import CONFIG_FILE, read_spec
from adapters.decoder.spec import NotConvertible, OnRead, ignore_read
from adapters.genai_facts import GENAI_CONFIG, read_genai_facts
from adapters.gguf_splits import list_first_files
from adapters.hf_facts import check_directory_config
from adapters.ir_facts import IR_FILE, IR_WEIGHTS, IrFacts
from adapters.safetensors_file import Stored, read_tensors

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
INDEX_FILE = "model.safetensors.index.json"
TARGET_FINGERPRINT = "target_vocabulary_fingerprint"
WHOLE_FILE = "model.safetensors"
IR_TOKENIZER_FILES = IR_TOKENIZER, IR_TOKENIZER_DATA = ("openvino_tokenizer.xml", "openvino_tokenizer.bin")

REQUIRED = (CONFIG_FILE, TOKENIZER_JSON)
_HF_FILES = (*REQUIRED, TOKENIZER_CONFIG, GENERATION_CONFIG, CHAT_TEMPLATE, INDEX_FILE)
SMALL_FILES = (*_HF_FILES, IR_FILE)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MOST_JSON_BYTES = 256 << 20  # a larger one is damage. Not tuned.
_HUB_STORAGE = "models--"


def title(directory: Path) -> str:
    """Return what a message calls a model directory: its name, or the model's id where it is a snapshot in the hub's
    cache, which is named by its commit only."""
    storage = directory.parent.parent.name
    if directory.parent.name == "snapshots" and storage.startswith(_HUB_STORAGE):
        return f"hf:{storage.removeprefix(_HUB_STORAGE).replace('--', '/', 1)}@{directory.name[:12]}"
    return directory.name


def model_files(directory: Path) -> tuple[Path, ...]:
    """Return the files of the model, in a fixed order.

    Raises ModelRefused, naming the file and the way out, when one is missing, the directory holds pickles
    instead of safetensors, or config.json is damaged. Weights are not opened.
    """
    names = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    check_small_files(directory, names)
    weights = weight_names(directory, names)
    missing = [name for name in weights if name not in names]
    if missing:
        raise ModelRefused(
            f"{title(directory)}: {missing[0]} is missing, one of {len(weights)} files. Download it again."
        )
    unused = {INDEX_FILE} if weights == (WHOLE_FILE,) else set()
    small = [name for name in _HF_FILES if name in names and name not in unused]
    return tuple(directory / name for name in sorted({*small, *weights}))


def check_small_files(directory: Path, names: Iterable[str]) -> None:
    """Check what needs no weights: `names` are the files that there are or will be. Raises ModelRefused."""
    names = set(names)
    if holds_genai(names):
        if TOKENIZER_JSON not in names:
            raise ModelRefused(f"{title(directory)}: it has no {TOKENIZER_JSON}. {_WAYS_OUT[TOKENIZER_JSON]}")
        read_genai_facts(directory, title(directory))
        return
    if holds_ir(names):
        if not names & {TOKENIZER_JSON, IR_TOKENIZER}:
            raise ModelRefused(f"{title(directory)}: it has no {TOKENIZER_JSON}. {_WAYS_OUT[TOKENIZER_JSON]}")
        read_ir_facts(directory)
        return
    ggufs = list_first_files(names)
    for name in REQUIRED:
        if name not in names and not (name == TOKENIZER_JSON and read_declared_fingerprint(directory)):
            way_out = f"It holds GGUF files; name one of them: {', '.join(ggufs)}" if ggufs else _WAYS_OUT[name]
            raise ModelRefused(f"{title(directory)}: it has no {name}. {way_out}")
    config, where = read_json(directory / CONFIG_FILE), f"{title(directory)}/{CONFIG_FILE}"
    try:
        read_spec(config, where)
    except NotConvertible:  # which runtimes run it is asked with the heads of its weights
        check_directory_config(config, where)


def holds_ir(names: Container[str]) -> bool:
    """Return whether a directory of these files has its model in OpenVINO's form. Safetensors go before it: every
    runtime reads them."""
    return IR_FILE in names and WHOLE_FILE not in names and INDEX_FILE not in names


def is_ir(directory: Path) -> bool:
    """Return whether a path is a directory that has its model in OpenVINO's form."""
    names = (IR_FILE, WHOLE_FILE, INDEX_FILE)
    return holds_ir({name for name in names if os.path.isfile(directory / name)})


def holds_genai(names: Container[str]) -> bool:
    """Return whether a directory of these files has its model in onnxruntime-genai's form. Safetensors and OpenVINO's
    form go before it."""
    return GENAI_CONFIG in names and not any(name in names for name in (IR_FILE, WHOLE_FILE, INDEX_FILE))


def is_genai(directory: Path) -> bool:
    """Return whether a path is a directory that has its model in onnxruntime-genai's form."""
    names = (GENAI_CONFIG, IR_FILE, WHOLE_FILE, INDEX_FILE)
    return holds_genai({name for name in names if os.path.isfile(directory / name)})


def has_own_graph(directory: Path) -> bool:
    """Return whether a path is a directory that brings the graph that it is run by."""
    return is_ir(directory) or is_genai(directory)


def read_graph_facts(directory: Path) -> IrFacts:
    """Return what a directory's own graph says. Raises ModelRefused."""
    return read_genai_facts(directory, title(directory)) if is_genai(directory) else read_ir_facts(directory)


def read_ir_facts(directory: Path) -> IrFacts:
    """Return what the graph of a model in OpenVINO's form says. Raises ModelRefused as `ir_facts.read_ir_facts`."""
    return ir_facts.read_ir_facts(directory, read_optional_json(directory / CONFIG_FILE), title(directory))


def read_vocabulary_size(directory: Path) -> int:
    """Return how many tokens a directory's model has. Raises ModelRefused."""
    if has_own_graph(directory):
        return read_graph_facts(directory).vocabulary_size
    return hf_config.read_vocabulary_size(read_json(directory / CONFIG_FILE), f"{title(directory)}/{CONFIG_FILE}")


def read_declared_fingerprint(directory: Path) -> str:
    """Return the vocabulary that a draft was trained for, where its config.json names it: such a draft brings no
    tokenizer, it speaks its target's ids. "" for any other model. Raises ModelRefused when the file is damaged."""
    fingerprint = read_optional_json(directory / CONFIG_FILE).get(TARGET_FINGERPRINT)
    return fingerprint if isinstance(fingerprint, str) else ""


_WAYS_OUT = {
    CONFIG_FILE: "Give a Hugging Face model directory, or the path of a GGUF file.",
    TOKENIZER_JSON: "Write one: AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)",
}


def weight_names(directory: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the safetensors files that hold the model: one file goes before an index, which may be left
    from another way of saving it (transformers reads it so, too). Raises ModelRefused when there are none."""
    names = set(names)
    if holds_genai(names):
        facts = read_genai_facts(directory, title(directory))
        return (GENAI_CONFIG, facts.graph, facts.data)
    if holds_ir(names):
        own_tokenizer = () if TOKENIZER_JSON in names else IR_TOKENIZER_FILES
        return (IR_FILE, IR_WEIGHTS, *own_tokenizer)
    if WHOLE_FILE in names:
        return (WHOLE_FILE,)
    if INDEX_FILE in names:
        places = read_json(directory / INDEX_FILE).get("weight_map")
        if isinstance(places, dict) and places and all(_plain_name(name) for name in places.values()):
            return tuple(sorted(set(places.values())))
        raise ModelRefused(f"{title(directory)}: {INDEX_FILE} names no safetensors files. Download it again.")
    pickles = sorted(name for name in names if name.endswith(PICKLES) and not name.startswith("training_args"))
    if pickles:
        raise ModelRefused(
            f"{title(directory)}: its weights are in {pickles[0]}, a pickle, which can run code and is never opened. "
            "Choose a revision with safetensors, or convert it where you trust it: "
            "AutoModelForCausalLM.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)"
        )
    raise ModelRefused(f"{title(directory)}: it has no {WHOLE_FILE} and no {INDEX_FILE}. Choose another model.")


def _plain_name(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file. Raises ModelRefused, by name, when it is damaged or unreadable."""
    try:
        if path.stat().st_size > _MOST_JSON_BYTES:
            raise ModelRefused(f"{path.name}: {path.stat().st_size} bytes are too many. Download it again.")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelRefused(f"{path.name}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{path.name}: it is no JSON ({error}). Download it again.") from error
    if not isinstance(content, dict):
        raise ModelRefused(f"{path.name}: it is no JSON object. Download it again.")
    return content


def read_optional_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, {} when there is no such file. Raises ModelRefused when it is damaged."""
    return read_json(path) if path.is_file() else {}


def open_weights(directory: Path, *, heads_only: bool = False, on_read: OnRead = ignore_read) -> SafetensorsWeights:
    """Open a model directory's weights; `heads_only`: without a look at their values. `on_read` hears of what is read.
    Raises ModelRefused, by file, when one is damaged, truncated or missing, and by key or tensor when it is not
    supported."""
    return SafetensorsWeights(
        *(read_json(directory / CONFIG_FILE), read_all_tensors(directory), title(directory)),
        heads_only=heads_only,
        on_read=on_read,
    )


def is_for_transformers(path: Path) -> bool:
    """Whether a model is a directory that no graph here is made of. Raises ModelRefused where it is damaged."""
    if not path.is_dir():
        return False
    try:
        read_spec(read_json(path / CONFIG_FILE), f"{title(path)}/{CONFIG_FILE}")
    except NotConvertible:
        return True
    return False


def list_shape_values(directory: Path) -> list[tuple[Path, int, int]]:
    """See `adapters.decoder.from_safetensors.list_shape_values`. Raises ModelRefused as `open_weights` does."""
    return from_safetensors.list_shape_values(read_all_tensors(directory), title(directory))


def read_all_tensors(directory: Path) -> dict[str, Stored]:
    """Return what the heads of a model's safetensors list. Raises ModelRefused."""
    tensors: dict[str, Stored] = {}
    for file in model_files(directory):
        if file.suffix == ".safetensors":
            tensors |= read_tensors(file)
    return tensors
