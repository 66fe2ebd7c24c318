"""What a tree does to a row's bits, and what it costs: OpenVINO's query-query bias, masks in torch, and forks.

Each row of a tree is compared with the same row at the end of a chain. The reference is the graph that the adapter
runs, in the numerical class that the loaded model has.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adapters.contract import ForkableKv, LoadedModel, Segment
from adapters.invariance import probe_text, same_bits
from adapters.openvino_rt.classes import HINTS, KV_HINTS
from device_profiles.numerical_class import NumericalClass
from device_profiles.units import MS_PER_S

CONTEXT = 70
SHAPES: dict[str, tuple[int, ...]] = {
    "a chain of 5": (-1, 0, 1, 2, 3),
    "2 at the first place": (-1, 0, 0),
    "5 at the first place": (-1, 0, 0, 0, 0, 0),
    "a chain of 4, and 1 beside its first": (-1, 0, 1, 2, 3, 0),
    "a chain of 4, and 1 beside its third": (-1, 0, 1, 2, 3, 2),
    "two chains of 3": (-1, 0, 1, 2, 0, 4, 5),
    "binary, 3 deep": (-1, 0, 0, 1, 1, 2, 2),
    "binary, 31 draft tokens": (-1, *((row - 1) // 2 for row in range(1, 32))),
}
"""Each row's parent; row 0 is the last committed token."""
_BLOCKS = 16
_ROUNDS = 25
_CHUNK = 35  # rows of a prompt's forward: every numerical class has so many
_CACHES = ("key_cache.", "value_cache.")
_HEADS, _KEYS_HEADS, _HEAD_SIZE, _KEYS = 9, 3, 64, 512  # the default model's, and the keys of a tile

Floats = NDArray[np.float32]


class TreeBits(NamedTuple):
    """Of `rows`, `other` have other bits than in a chain, `choices` another likeliest token. `most`: the greatest
    difference of a logit."""

    shape: str
    rows: int
    other: int
    choices: int
    most: float


def list_depths(parents: Sequence[int]) -> list[int]:
    """Return how many rows stand in front of each, on its path."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def find_path(parents: Sequence[int], row: int) -> list[int]:
    """Return the rows of a path, from row 0 on."""
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


def make_mask(parents: Sequence[int]) -> NDArray[np.uint8]:
    """Return which rows each row sees, shape (rows, rows): those of its path."""
    mask = np.zeros((len(parents), len(parents)), np.uint8)
    for row in range(len(parents)):
        mask[row, find_path(parents, row)] = 1
    return mask


class PagedGraph:
    """A paged graph with one sequence, as the adapter compiles it; with the mask's two inputs where `masked`."""

    def __init__(self, path: Path, chosen: NumericalClass, *, masked: bool) -> None:
        import openvino as ov
        from openvino._offline_transformations import paged_attention_transformation

        core = ov.Core()
        graph = core.read_model(path)
        paged_attention_transformation(graph, allow_qq_bias=masked)
        settings = {
            "INFERENCE_PRECISION_HINT": HINTS[chosen.activations],
            "KV_CACHE_PRECISION": KV_HINTS[chosen.kv_cache],
            "PERFORMANCE_HINT": "LATENCY",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": chosen.quantization_group,
        }
        self._tensor, self._masked = ov.Tensor, masked
        compiled = core.compile_model(graph, "CPU", settings)
        self._request: Any = compiled.create_infer_request()
        for port in compiled.inputs:
            if port.any_name.startswith(_CACHES):
                shape = [port.get_partial_shape()[axis].get_length() for axis in (1, 2, 3)]
                self._block = shape[1]
                tensor = ov.Tensor(port.get_element_type(), ov.Shape([_BLOCKS, *shape]))
                tensor.data.reshape(-1).view(np.uint8)[:] = 0
                self._request.set_tensor(port.any_name, tensor)

    def run(self, tokens: Sequence[int], past: int, parents: Sequence[int] = ()) -> Floats:
        """Return the logits of rows behind `past` positions, (rows, vocabulary): of a tree, or without one of a
        chain."""
        count = len(tokens)
        depths = list_depths(parents) if parents else list(range(count))
        blocks = -(-(past + count) // self._block)
        inputs = {
            "input_ids": np.array(tokens, np.int64),
            "position_ids": past + np.array(depths, np.int64),
            "past_lens": np.array([past], np.int32),
            "subsequence_begins": np.array([0, count], np.int32),
            "block_indices": np.arange(blocks, dtype=np.int32),
            "block_indices_begins": np.array([0, blocks], np.int32),
            "max_context_len": np.array(past + count, np.int32),
        }
        if self._masked:
            inputs["qq_bias"] = make_mask(parents).reshape(-1)
            inputs["qq_bias_begins"] = np.array([0, len(parents) ** 2], np.int32)
        for name, values in inputs.items():
            self._request.set_tensor(name, self._tensor(values))
        self._request.infer()
        found: Floats = self._request.get_output_tensor(0).data.reshape(count, -1).copy()
        return found


def compare_shapes(plain: PagedGraph, masked: PagedGraph, vocabulary: int) -> list[TreeBits]:
    """Return what becomes of each shape's rows."""
    prompt = [(7 * i * i + 11 * i + 3) % vocabulary for i in range(CONTEXT)]
    plain.run(prompt, 0)
    masked.run(prompt, 0)
    random = np.random.default_rng(1)
    found = []
    for shape, parents in SHAPES.items():
        tokens = [int(token) for token in random.integers(0, vocabulary, len(parents))]
        rows = masked.run(tokens, CONTEXT, parents)
        chains = []
        for row in range(len(parents)):
            path = [tokens[one] for one in find_path(parents, row)]
            pad = [path[0]] if len(path) == 1 else []  # a row alone would be of another class
            chains.append(plain.run([*path, *pad], CONTEXT)[len(path) - 1])
        expected = np.stack(chains)
        other = sum(not same_bits(row, one) for row, one in zip(rows, expected, strict=True))
        choices = int((rows.argmax(1) != expected.argmax(1)).sum())
        found.append(TreeBits(shape, len(parents), other, choices, float(np.abs(rows - expected).max())))
    return found


def time_rows(plain: PagedGraph, masked: PagedGraph, widths: Sequence[int]) -> list[tuple[int, list[float]]]:
    """Return for each number of rows the ms of a chain, of a chain in the graph with a mask, and of a binary tree:
    medians, taken in turns."""
    found = []
    for rows in widths:
        tokens, parents = list(range(100, 100 + rows)), (-1, *((row - 1) // 2 for row in range(1, rows)))
        calls = (
            partial(plain.run, tokens, CONTEXT),
            partial(masked.run, tokens, CONTEXT),
            partial(masked.run, tokens, CONTEXT, parents),
        )
        found.append((rows, _take_in_turns(*calls)))
    return found


def time_forks(model: LoadedModel, counts: Sequence[int]) -> list[tuple[int, float]]:
    """Return (forks, ms) of beginning and ending so many branches, each with a block of its own; no forward."""
    assert isinstance(model, ForkableKv)  # noqa: S101
    forkable: ForkableKv = model
    text = probe_text(model, CONTEXT)
    for start in range(0, CONTEXT, _CHUNK):
        model.forward([Segment(0, start, text[start : start + _CHUNK], (0, 0))])

    def fork(count: int) -> None:
        for slot in range(1, 1 + count):
            forkable.fork(slot, 0, CONTEXT, CONTEXT)
        for slot in range(1, 1 + count):
            model.release(slot)

    found = [(count, _take_in_turns(partial(fork, count))[0]) for count in counts]
    model.release(0)
    return found


def _take_in_turns(*calls: Callable[[], object]) -> list[float]:
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(_ROUNDS):
        for call, own in zip(calls, times, strict=True):
            started = time.perf_counter()
            call()
            own.append((time.perf_counter() - started) * MS_PER_S)
    return [statistics.median(own) for own in times]


def count_torch_rows(trials: int = 200) -> tuple[int, int]:
    """Return (rows with other bits, rows) of torch's attention on the CPU where masked keys stand between a row's own,
    in the shapes of adapters/torch_device: a tile of four rows over 512 keys."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    generator = torch.Generator().manual_seed(3)
    per_key, other = _HEADS // _KEYS_HEADS, 0
    for trial in range(trials):
        query = torch.randn(1, _KEYS_HEADS, per_key * 4, _HEAD_SIZE, generator=generator)
        keys, values = (torch.randn(1, _KEYS_HEADS, _KEYS, _HEAD_SIZE, generator=generator) for _ in range(2))
        held, gap = 40 + trial, 1 + trial % 8
        order = torch.cat([torch.arange(held), torch.arange(held + gap, _KEYS), torch.arange(held, held + gap)])
        seen = (torch.arange(_KEYS) <= held)[None].expand(per_key * 4, -1)[None, None]
        apart = torch.zeros(_KEYS, dtype=torch.bool)
        apart[:held] = apart[held + gap] = True
        chain = scaled_dot_product_attention(query, keys[:, :, order], values[:, :, order], attn_mask=seen)
        mask = apart[None].expand(per_key * 4, -1)[None, None]
        tree = scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        other += not bool(torch.equal(chain, tree))
    return other, trials
