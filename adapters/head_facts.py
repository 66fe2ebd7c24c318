"""A head that drafts from a target's hidden states: EAGLE-3 (arXiv 2503.01840), as a directory that others serve, too.

    config.json          a Llama's, with `draft_vocab_size`
    model.safetensors    fc, midlayer (or layers.0), norm, lm_head, and d2t: a token's id less the number of its output

The head reads the outputs of some layers of its target: those that `eagle_aux_hidden_state_layer_ids` names (NVIDIA's
key, as SGLang reads it), else those that the paper's code takes. Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adapters.decoder.hf_config import CONFIG_FILE
from adapters.errors import ModelRefused
from adapters.hf_directory import INDEX_FILE, PICKLES, WHOLE_FILE, read_json
from adapters.safetensors_file import Stored, read_tensors

_IDS, _MASK, _EMBEDDING = "d2t", "t2d", "embed_tokens.weight"
_LAYER, _LAYER_OF_OTHERS = "midlayer.", "layers.0."
_BODY = "model."
_FORM = "EAGLE-3's form is a Llama layer over the target's hidden states (LlamaForCausalLMEagle3)"
USUAL_LAYERS = 3
"""How many layers a head reads that does not name them."""
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """What a head's files say, before its weights are read.

    `config` is its config.json. `hidden` and `target_hidden`: how wide it and its target are. `outputs`: how many
    tokens it can say, of `vocabulary`. `layer_ids`: of which layers of the target it reads the outputs, () for the
    usual ones. `tensors` are named as `torch_device/head.py` has them.
    """

    title: str
    config: dict[str, Any]
    hidden: int
    target_hidden: int
    vocabulary: int
    outputs: int
    layer_ids: tuple[int, ...]
    tensors: dict[str, Stored]

    @property
    def has_embedding(self) -> bool:
        """Whether it reads tokens by an embedding of its own, and not by the target's."""
        return _EMBEDDING in self.tensors

    def read_output_ids(self) -> tuple[int, ...]:
        """Return which token each output says, () where output i is token i. Raises ModelRefused."""
        if _IDS not in self.tensors:
            return ()
        ids = self.tensors[_IDS].integers() + np.arange(self.outputs)
        if len(np.unique(ids)) < self.outputs or ids.min() < 0 or ids.max() >= self.vocabulary:
            raise ModelRefused(f"{self.title}: {_IDS} names a token twice, or one outside its {self.vocabulary}.")
        return tuple(ids.tolist())

    def choose_layers(self, layers: int) -> tuple[int, ...]:
        """Return of which of a target's layers the outputs are read, in their order. Raises ModelRefused."""
        usual = (1, layers // 2 - 1, layers - 4)
        chosen = self.layer_ids or usual
        if min(chosen) < 0 or max(chosen) >= layers:
            raise ModelRefused(
                f"{self.title}/{CONFIG_FILE}: it reads layers {', '.join(map(str, chosen))} ({_LAYER_IDS}), and the "
                f"target has {layers}, from 0. The head is another model's."
            )
        return chosen


def read_head(directory: Path) -> HeadFacts:
    """Return what a head's files say. Raises ModelRefused, which names the file, and the key or the tensor."""
    if not directory.is_dir():
        raise ModelRefused(f"{directory} is no directory. Name one with a head's {CONFIG_FILE} and {WHOLE_FILE}.")
    config, where = read_json(directory / CONFIG_FILE), f"{directory.name}/{CONFIG_FILE}"
    if config.get("model_type") != "llama":
        raise ModelRefused(f"{where}: model_type {config.get('model_type')!r} is no head that is read here. {_FORM}.")
    needed = ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size")
    sizes = {key: config.get(key) for key in (*needed, "target_hidden_size", "draft_vocab_size")}
    for key, size in sizes.items():
        if (size is not None or key in needed) and (not isinstance(size, int) or size < 1):
            raise ModelRefused(f"{where}: {key} is missing, or no number above 0. {_FORM}.")
    if config.get("num_hidden_layers", 1) != 1:
        raise ModelRefused(f"{where}: num_hidden_layers is {config['num_hidden_layers']}. {_FORM}, and of one.")
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    facts = HeadFacts(
        directory.name,
        config,
        hidden,
        sizes["target_hidden_size"] or hidden,
        vocabulary,
        sizes["draft_vocab_size"] or vocabulary,
        _read_layer_ids(config, where),
        _read_tensors(directory),
    )
    _check_shapes(facts, where)
    return facts


def _read_layer_ids(config: dict[str, Any], where: str) -> tuple[int, ...]:
    nested = config.get("eagle_config")
    ids = (nested if isinstance(nested, dict) else config).get(_LAYER_IDS) or []
    if not isinstance(ids, list) or not all(isinstance(number, int) for number in ids):
        raise ModelRefused(f"{where}: {_LAYER_IDS} is no list of numbers of layers.")
    return tuple(ids)


def check_head(head: HeadFacts, target: str, *, hidden: int, vocabulary: int, layers: int) -> None:
    """Refuse a head of another model than this target. Raises ModelRefused, which names the key."""
    where = f"{head.title}/{CONFIG_FILE}"
    for key, own, its in (("hidden_size", head.target_hidden, hidden), ("vocab_size", head.vocabulary, vocabulary)):
        if own != its:
            raise ModelRefused(f"{where}: {key} is {own}, and {target} has {its}. The head is another model's.")
    head.choose_layers(layers)


def _read_tensors(directory: Path) -> dict[str, Stored]:
    path = directory / WHOLE_FILE
    if not path.is_file():
        pickle = next((file.name for file in sorted(directory.iterdir()) if file.suffix in PICKLES), "")
        why = f"it holds {pickle}, which may run code when it is read. Convert it to {WHOLE_FILE}." if pickle else ""
        split = f"its weights are split ({INDEX_FILE}). Join them." if (directory / INDEX_FILE).is_file() else ""
        raise ModelRefused(f"{directory.name}: {why or split or f'it has no {WHOLE_FILE}.'}")
    tensors = {}
    for name, stored in read_tensors(path).items():
        short = name.removeprefix(_BODY).replace(_LAYER_OF_OTHERS, _LAYER, 1)
        if short != _MASK:  # d2t says the same
            tensors[short] = stored
    return tensors


def _check_shapes(head: HeadFacts, where: str) -> None:
    if head.outputs != head.vocabulary and _IDS not in head.tensors:
        raise ModelRefused(f"{where}: draft_vocab_size is {head.outputs} of {head.vocabulary}, and it has no {_IDS}.")
    fused = head.tensors.get("fc.weight")
    read = len(head.layer_ids) or USUAL_LAYERS
    if fused is None or fused.shape != (head.hidden, read * head.target_hidden):
        has = "is missing" if fused is None else f"has the shape {fused.shape}"
        raise ModelRefused(f"{head.title}: fc.weight {has}, not {(head.hidden, read * head.target_hidden)}. {_FORM}.")
    if head.hidden != head.target_hidden and not head.has_embedding:
        raise ModelRefused(f"{where}: hidden_size is not target_hidden_size, and it has no {_EMBEDDING}.")
    ids = head.tensors.get(_IDS)
    if ids is not None and ids.shape != (head.outputs,):
        raise ModelRefused(f"{where}: draft_vocab_size is {head.outputs}, and {_IDS} has the shape {ids.shape}.")
