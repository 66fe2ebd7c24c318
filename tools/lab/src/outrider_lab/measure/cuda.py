"""The torch adapter on a CUDA device beside transformers' compiled generate, on a Llama-shaped model of random weights.

    python -m outrider_lab.measure.cuda [--device CUDA:0] [--layers 16] [--tokens 128] [--context 512] [--exactness bit]

Prints, as JSON lines:

- Plain decoding in tokens per second, ours and `generate` with a static cache (which transformers compiles), and their
  ratio.
- The step time of 1 to 16 rows of one sequence, as a multiple of a single row's.

The default shape is Llama 3.2 1B's. A larger ratio is better in the first, a smaller one in the second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from adapters import registry
from adapters.contract import LoadedModel, LoadOptions, Precision, Segment
from adapters.decoder.rope import rope_from
from adapters.decoder.spec import DecoderSpec, Dense
from adapters.prepared_facts import write_facts
from adapters.source_meter import SourceMeter
from adapters.torch_device.weights import write_weights
from device_profiles.profile import Exactness

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 16)
REPEATS = 50
LLAMA_1B = DecoderSpec(
    family="llama",
    layers=16,
    hidden=2048,
    heads=32,
    kv_heads=8,
    head_dim=64,
    mlp=8192,
    vocabulary_size=128_256,
    context_length=8192,
    norm_epsilon=1e-5,
    activation="silu",
    query_scale=64**-0.5,
    ropes=(rope_from({"rope_theta": 500_000.0}, 64),) * 16,
    windows=(0,) * 16,
    tied_embeddings=True,
)


class RandomWeights:
    """Weights of a spec in bf16, small enough that nothing overflows."""

    label = "bf16"
    output_ids: tuple[int, ...] = ()

    def __init__(self, spec: DecoderSpec) -> None:
        self.spec = spec
        self._rng = np.random.default_rng(0)

    def tensor(self, name: str) -> Dense:
        """Return new random numbers under a canonical name; norms are ones."""
        shape = self.spec.shape_of(name)
        if name.endswith("norm"):
            return Dense(np.ones(shape, np.float32))
        values = self._rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
        return Dense((values.view(np.uint32) >> 16).astype(np.uint16), bfloat16=True)


def prepare(spec: DecoderSpec, target: Path) -> None:
    """Write the model as the adapter's `prepare` would."""
    write_weights(RandomWeights(spec), target, SourceMeter(Path(__file__), lambda done, total: None))
    write_facts(
        target,
        {
            "architecture": spec.family,
            "layers": spec.layers,
            "kv_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "context_length": spec.context_length,
            "vocabulary_size": spec.vocabulary_size,
            "vocabulary_fingerprint": "random",
            "weights": "bf16",
        },
    )


def plain_tokens_per_s(model: LoadedModel, prompt: list[int], tokens: int) -> float:
    """Greedy decoding, one row a step; prefill is not counted."""
    model.release(0)
    row = model.forward([Segment(0, 0, prompt, (len(prompt) - 1, len(prompt)))]).logits
    started = time.perf_counter()
    for _ in range(tokens):
        row = model.forward([Segment(0, model.count_cached_positions(0), [int(row[0].argmax())], (0, 1))]).logits
    return tokens / (time.perf_counter() - started)


def step_ms(model: LoadedModel, context: int, width: int) -> float:
    """Median time of a forward of `width` rows at `context` positions, our part of it included."""
    tokens = list(range(5, 5 + width))
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        model.forward([Segment(0, context, tokens, (0, width))])
        times.append((time.perf_counter() - started) * 1000.0)
    return statistics.median(times)


def generate_tokens_per_s(network: Any, prompt: list[int], tokens: int, device: str) -> float:
    """transformers' generate with a static cache and its own compilation; prefill is subtracted."""
    import torch

    ids = torch.tensor([prompt], device=device)

    def seconds(count: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        network.generate(
            ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, cache_implementation="static"
        )
        torch.cuda.synchronize()
        return time.perf_counter() - started

    for _ in range(3):  # compiles, and warms up
        seconds(tokens + 1)
    return tokens / (min(seconds(tokens + 1) for _ in range(3)) - min(seconds(1) for _ in range(3)))


def theirs(prepared: Path, spec: DecoderSpec, device: str) -> Any:
    """transformers' own model over the same weights, with its own attention."""
    import torch
    from torch import nn

    from adapters.torch_device.parts import build
    from adapters.torch_device.weights import read_prepared_tensors

    def make(weight: Any, bias: Any) -> Any:
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        return linear

    network = build(
        spec,
        spec.all_layers,
        read_prepared_tensors(prepared, spec, spec.all_layers),
        dtype=torch.bfloat16,
        device=torch.device(device),
        make_linear=make,
    )
    network.set_attn_implementation("sdpa")
    if len(set(spec.windows)) == 1:
        del network.config.layer_types  # else `generate` makes a mask for each type, which one-typed families refuse
    return network


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="CUDA:0")
    parser.add_argument("--layers", type=int, default=LLAMA_1B.layers)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--exactness", type=Exactness, choices=list(Exactness), default=Exactness.BIT)
    arguments = parser.parse_args()
    adapter = registry.get("torch_device")
    if arguments.device not in [device.name for device in adapter.devices()]:
        sys.exit(f"there is no device {arguments.device}; `outrider doctor` shows those that are there")
    layers = arguments.layers
    spec = replace(LLAMA_1B, layers=layers, ropes=LLAMA_1B.ropes[:1] * layers, windows=(0,) * layers)
    prompt = [(7 * i * i + 11) % spec.vocabulary_size for i in range(arguments.context)]
    options = LoadOptions(
        device=arguments.device, exactness=arguments.exactness, slots=4, max_batch_rows=1024, activations=Precision.BF16
    )
    with tempfile.TemporaryDirectory() as work:
        prepare(spec, Path(work))
        model = adapter.load(Path(work), options, lambda _stage, _fraction: None)
        plain_tokens_per_s(model, prompt, 8)  # captures the graphs
        ours = max(plain_tokens_per_s(model, prompt, arguments.tokens) for _ in range(3))
        steps = {width: step_ms(model, arguments.context, width) for width in WIDTHS}
        model.close()
        print(json.dumps({"step_ms": steps, "five_rows_to_one": steps[5] / steps[1]}))
        network = theirs(Path(work), spec, arguments.device.lower())
        other = generate_tokens_per_s(network, prompt, arguments.tokens, arguments.device.lower())
    print(json.dumps({"outrider_tokens_per_s": ours, "generate_tokens_per_s": other, "ratio": ours / other}))


if __name__ == "__main__":
    main()
