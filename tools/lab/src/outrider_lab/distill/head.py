"""Trains an EAGLE-3 head (arXiv 2503.01840) on a target's hidden states and on what the target said.

The network is the one that serves (`adapters/torch_device/head.py`). The target's states are computed once. A step runs
the head several times, as drafting does: first over the target's states, then over what it made itself of the row
before. So it learns to go on from its own states, too.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch.nn.functional import scaled_dot_product_attention

from adapters import registry
from adapters.contract import Exactness, LayerRange, LoadOptions, NumericalClass, Precision
from adapters.head_facts import HeadFacts, read_head
from adapters.model_source import resolve
from adapters.prepared_facts import read_facts
from adapters.torch_device.attention import attending
from adapters.torch_device.head import HeadNetwork, find_layers, load_head_network
from adapters.torch_device.parts import load_part
from adapters.torch_device.rank_link import RankPlace
from orchestrator.generating.data import DataError, TargetFacts, Text
from outrider_lab.distill.lines import Rows, indexes_of, rows_of
from outrider_lab.distill.train import compute_loss

_ROW_TOKENS = 512  # of a row that attends within itself. Bounds memory; not tuned.
_PASSES = 2  # the first over the target's states, others over the head's own. EAGLE-3 takes 7; time bounds it here.
_LATER = 0.8  # weight of each pass over that of the one before, as in EAGLE-3.
_SAID_EVERY_S = 30.0  # what a person who watches wants. Not tuned.
_WARM_UP = 30  # steps until the learning rate is whole. Not tuned.


class _Within:
    """Stands behind the attention of every layer: rows attend within themselves. See attention.AttendingBatch."""

    def attend(self, module: Any, query: Any, key: Any, value: Any, rule: Any, **options: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scale = options.get("scaling")
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale).transpose(1, 2)


class Target:
    """A target's network, whose states are read. Prepared once, in `directory`."""

    def __init__(self, facts: TargetFacts, directory: Path) -> None:
        """Load it in bfloat16 where the processor has that. Raises DataError, and what adapters raise."""
        adapter = registry.get("torch_device")
        if not (directory / "spec.json").is_file():
            directory.mkdir(parents=True, exist_ok=True)
            adapter.prepare(resolve(facts.source, Path.cwd()).path, directory, lambda *_: None)
        known = read_facts(directory)
        if known.get("loader"):
            raise DataError(f"{facts.name}: heads are trained for families of docs/models.md that need no other class")
        options = LoadOptions(exactness=Exactness.KERNEL, kv_cache_bytes=1 << 20)
        first = adapter.classes(options)[0][0].activations
        its_class, whole = NumericalClass(first, first), LayerRange(0, known["layers"])
        self.network = load_part(directory, options, its_class, whole, 1, RankPlace("CPU", 0)).runner.network
        self.is_half = first is Precision.BF16
        self.layer_ids = (1, known["layers"] // 2 - 1, known["layers"] - 4)

    def compute_states(self, tokens: NDArray[np.int32]) -> torch.Tensor:
        """Return the outputs of the layers, (rows, length, layers * hidden), of tokens (rows, length)."""
        states: dict[int, torch.Tensor] = {}

        def note(number: int) -> Any:
            def take(module: Any, given: Any, output: Any) -> None:
                states[number] = output[0] if isinstance(output, tuple) else output

            return take

        layers = find_layers(self.network)
        hooks = [layers[number].register_forward_hook(note(number)) for number in self.layer_ids]
        ids = torch.from_numpy(tokens.astype(np.int64))
        with torch.inference_mode(), attending(_Within()):
            self.network.model(input_ids=ids, use_cache=False)
        for hook in hooks:
            hook.remove()
        return torch.cat([states[number] for number in self.layer_ids], dim=-1).to(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Bounds:
    """A run trains for `seconds` (inf: no bound), the target's forwards excluded, and at most `steps` (0: no bound), of
    so many rows each."""

    seconds: float
    steps: int = 0
    batch_rows: int = 4
    learning_rate: float = 1e-3


@dataclass(slots=True)
class Trained:
    """A head, and how it does on held-out texts: the share of labelled positions at which its first choice is the
    target's, for drafts of each depth."""

    network: HeadNetwork
    facts: HeadFacts
    outputs: NDArray[np.int64]
    agreement: tuple[float, ...] = ()
    steps: int = 0
    seconds: float = 0.0


def begin(target: Target, facts: TargetFacts, outputs: NDArray[np.int64], directory: Path) -> Trained:
    """Return a head to train: that of `directory` where there is one, else a fresh one, which begins with the target's
    norm and output layer, and with the last of its states. Raises ModelRefused."""
    if (directory / "config.json").is_file():
        known = read_head(directory)
        ids = np.array(known.read_output_ids(), np.int64)
        return Trained(load_head_network(known, torch.float32, torch.device("cpu")), known, ids)
    network, config = target.network, target.network.config
    hidden, size = config.hidden_size, config.head_dim
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": size,
        "vocab_size": facts.vocabulary_size,
        "draft_vocab_size": len(outputs),
        "max_position_embeddings": facts.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": 10_000.0,
        "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(target.layer_ids)},
    }
    known = HeadFacts("head", settings, hidden, hidden, facts.vocabulary_size, len(outputs), target.layer_ids, {})
    torch.manual_seed(0)
    own = HeadNetwork(known)
    with torch.no_grad():
        own.fc.weight.zero_()[:, -hidden:] = torch.eye(hidden)
        own.norm.weight.copy_(network.model.norm.weight)
        own.lm_head.weight.copy_(network.get_input_embeddings().weight[torch.from_numpy(outputs)])
        for part in (own.midlayer.self_attn.o_proj, own.midlayer.mlp.down_proj):
            part.weight.zero_()  # the layer begins by changing nothing
    return Trained(own, known, outputs)


def train(
    head: Trained,
    target: Target,
    training: Sequence[Text],
    held_out: Sequence[Text],
    bounds: Bounds,
    tell: Callable[[str], None],
) -> None:
    rows = _lay_out(training, head, len(training))
    states = _compute_all(target, rows, tell)
    network = head.network.train().requires_grad_(True)
    tables = [network.lm_head.weight]
    others = [weight for name, weight in network.named_parameters() if name != "lm_head.weight"]
    groups = [{"params": others, "scale": 1.0}, {"params": tables, "scale": 0.2}]
    optimizer = torch.optim.AdamW(groups, lr=bounds.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    rng, began_s, said_s = np.random.default_rng(0), time.monotonic(), time.monotonic()
    while True:
        past_s = time.monotonic() - began_s
        done = max(past_s / bounds.seconds, head.steps / bounds.steps if bounds.steps else 0.0)
        if done >= 1.0:
            break
        chosen = rng.choice(len(rows.tokens), min(bounds.batch_rows, len(rows.tokens)), replace=False)
        share = min(1.0, (head.steps + 1) / _WARM_UP) * (0.02 + 0.98 * math.cos(math.pi / 2 * done))
        for group in optimizer.param_groups:
            group["lr"] = bounds.learning_rate * share * group["scale"]
        optimizer.zero_grad(set_to_none=True)
        loss = torch.stack(_run(head, target, rows, states, chosen)[0]).mul(_LATER ** torch.arange(_PASSES)).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()
        head.steps += 1
        if time.monotonic() - said_s > _SAID_EVERY_S:
            said_s = time.monotonic()
            tell(f"step {head.steps}, {past_s:.0f} s, loss {float(loss.detach()) / _PASSES:.3f}")
    head.seconds = time.monotonic() - began_s
    network.eval().requires_grad_(False)
    kept = _lay_out(held_out, head, len(held_out))
    right = _run_held_out(head, target, kept, _compute_all(target, kept, tell))
    head.agreement = tuple(right)


def write_head(head: Trained, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.to(torch.bfloat16).contiguous() for name, weight in head.network.state_dict().items()}
    tensors["d2t"] = torch.from_numpy(head.outputs - np.arange(len(head.outputs)))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(head.facts.config, indent=1) + "\n", encoding="utf-8")


def _lay_out(texts: Sequence[Text], head: Trained, count: int) -> Rows:
    indexes = indexes_of(head.outputs, head.facts.vocabulary)
    return rows_of(texts, indexes, _ROW_TOKENS, np.random.default_rng(0).permutation(count))


def _compute_all(target: Target, rows: Rows, tell: Callable[[str], None]) -> torch.Tensor:
    began_s = said_s = time.monotonic()
    states = []
    for index, tokens in enumerate(rows.tokens):
        states.append(target.compute_states(tokens[None]))
        if (now_s := time.monotonic()) - said_s > _SAID_EVERY_S or index + 1 == len(rows.tokens):
            said_s = now_s
            tell(f"states of {(index + 1) * tokens.size} of {rows.tokens.size} tokens in {now_s - began_s:.0f} s")
    return torch.cat(states)


def _run(
    head: Trained, target: Target, rows: Rows, states: torch.Tensor, chosen: NDArray[np.int64]
) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """Return the loss of each pass over some rows, and how many positions each had, and got right."""
    network, tokens = head.network, torch.from_numpy(rows.tokens[chosen].astype(np.int64))
    # The clone lets autograd save what was computed under inference_mode.
    embedded = target.network.get_input_embeddings()(tokens).float().clone()
    fused = network.fc(states[torch.from_numpy(chosen)].float().clone())
    ids = torch.from_numpy(rows.top_ids[chosen].astype(np.int64))
    chances = torch.from_numpy(rows.chances[chosen]).float()
    positions = torch.arange(tokens.shape[1])[None]
    losses, counts = [], []
    for number in range(_PASSES):
        # Position i takes the state of the position before, and says what comes behind it.
        before = torch.cat([torch.zeros_like(fused[:, :1]), fused[:, :-1]], dim=1)
        labelled = (chances > 0).any(dim=-1)
        labelled[:, : number + 1] = False
        with attending(_Within()), torch.autocast("cpu", torch.bfloat16, enabled=target.is_half):
            fused = network.compute_hidden(embedded, before, positions)
            logits = network.lm_head(network.norm(fused[labelled])).float()
        losses.append(compute_loss(logits, ids[labelled], chances[labelled]))
        counts.append((int(labelled.sum()), int((logits.argmax(dim=-1) == ids[labelled][:, 0]).sum())))
    return losses, counts


def _run_held_out(head: Trained, target: Target, rows: Rows, states: torch.Tensor) -> list[float]:
    total = np.zeros((_PASSES, 2))
    with torch.no_grad():
        for index in range(len(rows.tokens)):
            total += np.array(_run(head, target, rows, states, np.array([index]))[1])
    return [float(right / max(1.0, asked)) for asked, right in total]
