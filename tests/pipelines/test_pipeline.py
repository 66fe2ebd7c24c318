"""What is true of shards beyond the contract: their memory, their failures, and that they say what the whole says."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters import registry
from adapters.conformance.case import Prepared, bits, run, text
from adapters.contract import (
    CapacityError,
    DeviceLost,
    LayerRange,
    LoadedModel,
    LoadOptions,
    Segment,
    ShardingAdapter,
    Unsupported,
    silent,
)
from adapters.names import OWN_ADAPTERS, SHARDING_ADAPTERS
from adapters.pipeline import PipelineModel
from adapters.simulated.adapter import SimulatedAdapter
from adapters.simulated.model import ToyModel
from tests.pipelines.conftest import LAYERS, Cut

PREPARED = "script.txt"


def test_shards_say_what_the_whole_says(prepared: Prepared, model: LoadedModel, uncut: LoadedModel) -> None:
    tokens = text(model, 40)
    cut, whole = (run(one, 0, tokens, [33, 1, 6]) for one in (model, uncut))
    uncut.release(0)
    if prepared.adapter.name == "simulated":
        assert np.array_equal(bits(cut), bits(whole))
    # A runtime may fuse across a cut, and round where shards meet: on a processor that does, last bits differ.
    assert np.allclose(cut, whole, atol=5e-2 * float(np.abs(whole).max()))


def test_each_shard_has_its_part_of_the_kv_cache(cut: Cut, model: LoadedModel, uncut: LoadedModel) -> None:
    assert isinstance(model, PipelineModel)
    alike = len(cut[0]) == 1
    assert alike is (model.spec == uncut.spec), "all of them together take what the whole takes, in one format"
    for shard in model.shards if alike else ():
        layers = shard.layers.end - shard.layers.first
        assert shard.spec.bytes_per_token == pytest.approx(uncut.spec.bytes_per_token * layers / LAYERS)
        room, most = ((one := each.capabilities).total_blocks * one.block_tokens for each in (shard, uncut))
        assert abs(room - most) <= LAYERS * uncut.capabilities.block_tokens


@pytest.mark.parametrize("layers", [LayerRange(0, LAYERS + 1), LayerRange(2, 2), LayerRange(-1, 2), LayerRange(3, 1)])
def test_a_range_that_is_not_in_the_model_is_refused(whole: Prepared, layers: LayerRange) -> None:
    assert isinstance(whole.adapter, ShardingAdapter)
    with pytest.raises(Unsupported, match=f"are not in the model, which has {LAYERS}"):
        whole.adapter.load_layers(whole.path, LoadOptions(device=whole.case.device), layers, silent)


@pytest.mark.parametrize("name", OWN_ADAPTERS)
def test_the_adapters_that_load_ranges_of_layers_are_known_by_name(name: str) -> None:
    assert isinstance(registry.get(name), ShardingAdapter) == (name in SHARDING_ADAPTERS)


def load_toy(directory: Path, script: str = "", cuts: tuple[int, ...] = (1, 3), **options: Any) -> PipelineModel:
    adapter = SimulatedAdapter()
    (directory / PREPARED).write_text(f"layers={LAYERS}&{script}")
    asked = LoadOptions(device="SIM", **({"slots": 4, "kv_cache_bytes": 64 << 10} | options))
    ends = [0, *np.cumsum(cuts).tolist()]
    ranges = [LayerRange(first, end) for first, end in itertools.pairwise(ends)]
    return PipelineModel([adapter.load_layers(directory, asked, one, silent) for one in ranges])


@pytest.mark.parametrize(
    ("cuts", "said"), [((1, 2), "are not the 4 layers"), ((4, 0), "are not in the model"), ((3,), "are not the 4")]
)
def test_shards_that_are_not_the_model_make_none(tmp_path: Path, cuts: tuple[int, ...], said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        load_toy(tmp_path, cuts=cuts)


def test_a_shard_without_room_changes_nothing_in_any(tmp_path: Path) -> None:
    model = load_toy(tmp_path)
    first, second = shards = [one for one in model.shards if isinstance(one, ToyModel)]
    assert second.capabilities.total_blocks < first.capabilities.total_blocks, "the same bytes for more layers"
    blocks = second.capabilities.total_blocks
    model.forward([Segment(0, 0, [5] * (16 * (blocks - 1)), (0, 0))])
    held = [(shard.free_blocks(), shard.count_cached_positions(0)) for shard in shards]
    with pytest.raises(CapacityError, match="layers 1 to 3"):
        model.forward([Segment(1, 0, [5] * 33, (0, 0))])
    assert held == [(shard.free_blocks(), shard.count_cached_positions(0)) for shard in shards]


def test_a_lost_shard_is_a_lost_model(tmp_path: Path) -> None:
    model = load_toy(tmp_path, "fault=device_lost&at=3")
    batch = [Segment(0, 0, [5, 6], (1, 2))]
    for _ in range(2):
        model.forward(batch)
    for _ in range(2):
        with pytest.raises(DeviceLost):
            model.forward(batch)


@given(
    st.lists(st.lists(st.integers(3, 250), min_size=1, max_size=9), min_size=1, max_size=3),
    st.sampled_from([(1, 3), (2, 1, 1), (1, 1, 1, 1)]),
)
def test_any_batch_is_what_the_whole_makes_of_it(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]], cuts: tuple[int, ...]
) -> None:
    directory = tmp_path_factory.mktemp("toy")
    cut, whole = load_toy(directory, cuts=cuts), load_toy(directory, cuts=(LAYERS,))
    batch = [Segment(slot, 0, tokens, (0, len(tokens))) for slot, tokens in enumerate(prompts)]
    again = [Segment(slot, len(tokens) - 1, [7, 8], (0, 2)) for slot, tokens in enumerate(prompts)]
    for part in (batch, again):
        assert np.array_equal(bits(cut.forward(part).logits), bits(whole.forward(part).logits))
