"""Attention of all sequences in one call, as on CUDA: what it computes, on tensors of the CPU; what a round launches,
allocates and waits for, on fake tensors of CUDA; and the sizes of graphs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention
from torch.profiler import profile

from adapters import registry
from adapters.contract import BlockRules, Exactness, LayerRange, LoadOptions, Precision, Segment, silent
from adapters.kv_blocks import BlockPool
from adapters.torch_device import any_decoder, attention, runner
from adapters.torch_device.attention import MASKED, KvPool, LayerKv
from adapters.torch_device.flex import FAR, PageTables, attend_pages, choose_kernel
from adapters.torch_device.parts import build
from adapters.torch_device.plan import (
    LADDER,
    MOST_WANTED,
    TILE_ROWS,
    TILE_STEPS,
    ForwardPlan,
    Size,
    list_decode_sizes,
    make_blank_inputs,
    pad_inputs,
    plan_forward,
    shapes_for,
    size_of,
    size_of_graph,
)
from adapters.torch_device.products import Products
from adapters.torch_device.runner import FlexForwards, ForwardRunner, Graphs
from adapters.torch_device.weights import read_decoder, read_prepared_tensors
from tests.adapters.test_hf_reference import TOKENS
from tests.adapters.test_torch_device import prepare_variant
from tests.support.fake_cuda import counting, fake_cuda, place
from tests.support.tiny_decoders import write_decoder

ADAPTER = registry.get("torch_device")
OPTIONS = LoadOptions(slots=40, kv_cache_bytes=1 << 19, activations=Precision.FP32)
CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
BLOCK = 32
Rule = Callable[[Any, Any, Any, Any], Any]


@pytest.fixture(autouse=True)
def _without_compiler(monkeypatch):
    """FlexAttention's own plain form, over the whole pool: what is seen follows from the mask alone."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def is_in_chunk(batch: Any, head: Any, row: Any, place: Any) -> Any:
    return row // 24 == place // 24


Sequences = list[tuple[int, int]]
sequences = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=6)


def plan_sequences(
    given: Sequences, blocks: int = 60, wanted: int = FAR, best: Sequence[int] = (0,)
) -> tuple[ForwardPlan, BlockPool, list[Segment]]:
    """A forward of sequences that hold so many positions, and get so many tokens more. `wanted`: of how many of these
    the logits are, from the last on. `best`: how many are enough, in turns (Segment.best)."""
    pool = BlockPool(BlockRules(blocks, BLOCK, len(given)))
    batch = [
        Segment(slot, held, [1] * rows, (max(0, rows - wanted), rows), best=count, temperature=0.7 * (count > 1))
        for slot, ((held, rows), count) in enumerate(zip(given, cycle(best), strict=False))
    ]
    if before := [Segment(slot, 0, [1] * held, (0, 0)) for slot, (held, _) in enumerate(given) if held]:
        pool.reserve(before)
    pool.reserve(batch)
    return plan_forward(batch, pool, shapes_for("cuda", Exactness.KERNEL)), pool, batch


def attend_plainly(
    query: Any, key: Any, value: Any, seen: Any, *, softcap: float | None = None, sinks: Any = None
) -> Any:
    """(H, N, D) over (K, L, D), by the definition."""
    shared = len(query) // len(key)
    scores = query @ key.repeat_interleave(shared, 0).transpose(1, 2) * query.shape[2] ** -0.5
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], dim=2)
    return scores.softmax(dim=2)[..., : key.shape[1]] @ value.repeat_interleave(shared, 0)


@settings(max_examples=25, deadline=None)
@given(
    held=sequences,
    heads=st.sampled_from([(1, 1), (6, 2), (4, 4)]),
    value_dim=st.sampled_from([16, 8]),
    window=st.sampled_from([0, 1, 20, 64]),
    rule=st.sampled_from([None, is_in_chunk]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
)
def test_all_sequences_in_one_call_are_attended_as_by_the_definition(
    held: Sequences,
    heads: tuple[int, int],
    value_dim: int,
    window: int,
    rule: Rule | None,
    softcap: float | None,
    sinks: bool,
) -> None:
    plan, pool, batch = plan_sequences(held)
    kv = KvPool([LayerKv(heads[1], 16, value_dim)], blocks=pool.total, block=BLOCK, dtype=torch.float32, device=CPU)
    for cache in kv._caches[0]:
        cache[: pool.total].normal_()
    size = size_of_graph(plan)
    assert size is not None
    inputs, tables = pad_inputs(plan, size, block=BLOCK, pool_blocks=kv.blocks)
    *_, rows, positions = torch.from_numpy(inputs).split([length for _, length in size.inputs])
    kept = PageTables(kv, CPU, TILE_STEPS[-1])
    pages = kept.get_pages(size.tiles)
    kept.send(*make_blank_inputs(size, block=BLOCK, pool_blocks=kv.blocks)[1:], pages)  # a graph's before
    kept.send(tables, pages)
    query, beside = torch.randn(heads[0], len(plan.ids), 16), torch.randn(heads[0]) if sinks else None
    keys, values = kv.get_views(0)
    made = attend_pages(
        query[None][:, :, rows],
        keys,
        values,
        pages,
        positions,
        torch.tensor(window or FAR),
        BLOCK,
        rule=rule,
        softcap=softcap,
        sinks=beside,
    )[0][:, torch.from_numpy(plan.sources)]
    at = 0
    for segment in batch:
        count = segment.start + len(segment.tokens)
        table = pool.table(segment.slot, count)
        key, value = (cache[table].flatten(0, 1)[:count].transpose(0, 1) for cache in kv._caches[0])
        own, places = torch.arange(segment.start, count)[:, None], torch.arange(count)
        seen = places <= own
        if rule is not None:
            seen &= rule(0, 0, own, places)
        elif window:
            seen &= places > own - window
        span = slice(at, at + len(segment.tokens))
        expected = attend_plainly(query[:, span], key, value, seen, softcap=softcap, sinks=beside)
        assert torch.allclose(made[:, span], expected, atol=1e-5)
        at = span.stop


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="torch compiles with g++ here")
def test_the_compiled_kernel_reads_the_blocks_that_it_is_told_and_copies_none(monkeypatch):
    """torch's kernel for the CPU, of the same call: it goes by the lists of blocks, which the plain form does not."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    plan, pool, _ = plan_sequences([(40, 3), (0, 20), (70, 1)], blocks=2000)
    kv = KvPool([LayerKv(2, 16, 16)], blocks=pool.total, block=BLOCK, dtype=torch.float32, device=CPU)
    size = size_of(plan)
    inputs, tables = pad_inputs(plan, size, block=BLOCK, pool_blocks=kv.blocks)
    *_, rows, positions = torch.from_numpy(inputs).split([length for _, length in size.inputs])
    kept = PageTables(kv, CPU, TILE_STEPS[-1])
    pages = kept.get_pages(size.tiles)
    kept.send(tables, pages)
    for cache in kv._caches[0]:
        cache.fill_(torch.nan)  # what nobody is told of
        cache[[*pool.table(0, 43), *pool.table(1, 20), *pool.table(2, 71)]] = torch.randn(6, BLOCK, 2, 16)
    query = torch.randn(1, 4, len(plan.ids), 16)[:, :, rows]
    keys, values = kv.get_views(0)
    assert keys.data_ptr() == kv._caches[0][0].data_ptr()
    compiled = torch.compile(attend_pages, fullgraph=True, dynamic=False)
    with torch.inference_mode():
        given = (query, keys, values, pages, positions, torch.tensor(48), BLOCK)
        made = compiled(*given)
        with profile(profile_memory=True) as seen:
            compiled(*given)
        pool_bytes = keys.numel() * keys.element_size()
        assert max(event.cpu_memory_usage for event in seen.events()) < pool_bytes // 8
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    plain = attend_pages(query, keys.nan_to_num(), values.nan_to_num(), *given[3:])
    assert torch.isfinite(made).all()
    assert torch.allclose(made, plain, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama4_text", "deepseek_v3"])
def test_a_graph_computes_what_a_processor_does_sequence_by_sequence(tmp_path, name):
    """Windows, bounded scores, sinks, chunks, values shorter than keys; by all of CUDA's path but the capture."""
    target = prepare(tmp_path, name)
    model: Any = ADAPTER.load(target, OPTIONS, silent)
    own, pool, shapes = model._runner, model._pool, shapes_for("cuda", Exactness.KERNEL)
    forwards = FlexForwards(own.compute, own._pool, attend_pages, windows=own._windows, device=CPU)
    graphs = Graphs(forwards, lambda step: step, most_rows=MOST_WANTED)
    before = [Segment(slot, 0, TOKENS[:held], (0, 0)) for slot, held in ((0, 33), (2, 5))]
    pool.reserve(before)
    own.run(plan_forward(before, pool, shapes))
    batch = [Segment(2, 5, TOKENS[5:6], (0, 1)), Segment(0, 33, TOKENS[33:63], (4, 30)), Segment(1, 0, [7, 8], (0, 0))]
    pool.reserve(batch)
    plan = plan_forward(batch, pool, shapes)
    expected = own.run(plan).output.copy()
    size = size_of_graph(plan)
    assert size == Size(64, 32, 8)
    with torch.inference_mode():
        graphs.prepare(size)
        for _ in range(2):
            made = graphs.replay(plan, size)[: plan.wanted_count].numpy()
            assert np.abs(made - expected).max() < 2e-4
        assert np.abs(forwards.run(plan)[: plan.wanted_count].numpy() - expected).max() < 2e-4
    model.close()


def prepare(root: Any, name: str) -> Any:
    if name.startswith(("llama4", "gpt", "deepseek", "olmo")):
        target = root / "prepared"
        target.mkdir()
        ADAPTER.prepare(write_decoder(root / name, name), target, silent)
        return target
    return prepare_variant(root, name)[1]


def test_the_graph_that_was_not_used_for_longest_goes(tmp_path, monkeypatch):
    model: Any = ADAPTER.load(prepare(tmp_path, "llama"), OPTIONS, silent)
    own = model._runner
    made: list[int] = []

    def compute(ids: Any, *_: Any) -> Any:
        made.append(len(ids))
        return torch.zeros((1, 4))

    forwards = FlexForwards(compute, own._pool, attend_pages, windows=(), device=CPU)
    graphs = Graphs(forwards, lambda step: step, most_rows=MOST_WANTED)
    monkeypatch.setattr(runner, "MOST_GRAPHS", 2)
    sizes = list_decode_sizes(shapes_for("cuda", Exactness.KERNEL), most_rows=32, slots=2)
    first, second, third = sizes
    for size in (first, second, first, third, first, second):
        graphs.prepare(size)
    assert made == [8, 16, 32, 16]
    model.close()


@given(
    rows=st.lists(st.integers(1, TILE_ROWS), min_size=1, max_size=40),
    exactness=st.sampled_from(Exactness),
)
def test_sequences_that_decode_find_a_graph_that_was_captured_ahead(rows: list[int], exactness: Exactness) -> None:
    shapes = shapes_for("cuda", exactness)
    pool = BlockPool(BlockRules(50, BLOCK, 40))
    batch = [Segment(slot, 0, [1] * count, (0, count)) for slot, count in enumerate(rows)]
    pool.reserve(batch)
    plan = plan_forward(batch, pool, shapes)
    size, ahead = size_of_graph(plan), list_decode_sizes(shapes, most_rows=512, slots=40)
    assert len(ahead) == len(set(ahead)) <= runner.MOST_GRAPHS
    if sum(rows) <= MOST_WANTED:
        assert size in ahead
    own = size_of(plan)
    if size is not None:
        assert size.wanted >= own.wanted
        assert size.tiles >= own.tiles
        assert size.rows in LADDER
        assert 0 <= size.rows - own.rows < 64


def test_the_ladder_reaches_512_rows_in_steps_that_double_at_most():
    assert LADDER[-1] == 512
    assert all(before < step <= 2 * before for before, step in pairwise(LADDER))
    batch = [Segment(0, 0, [1] * 508, (507, 508)), *(Segment(slot, 0, [1], (0, 1)) for slot in range(1, 5))]
    pool = BlockPool(BlockRules(50, BLOCK, 8))
    pool.reserve(batch)
    shapes = shapes_for("cuda", Exactness.BIT)
    assert size_of_graph(plan_forward(batch, pool, shapes)) == Size(512, 64, 128)
    batch.append(Segment(5, 0, [1], (0, 1)))
    pool.reserve(batch)
    assert size_of_graph(plan_forward(batch, pool, shapes)) is None


def run_on_fake_cuda(
    monkeypatch: Any,
    target: Any,
    name: str,
    given: Sequences,
    blocks: int,
    wanted: int = FAR,
    best: Sequence[int] = (0,),
) -> Any:
    """Return the counts of a second round of sequences on CUDA, and how many layers there are."""
    attention.register()
    dense = name not in ("olmo3",)
    if dense:
        decoder = read_decoder(target)
        whole = LayerRange(0, decoder.layers)
        make = Products(CUDA, Precision.BF16, 0).make
        tensors = read_prepared_tensors(target, decoder, whole, None)
        network = build(decoder, whole, tensors, dtype=torch.bfloat16, device=CPU, make_linear=make)
        kept, windows, past = LayerKv(decoder.kv_heads, decoder.head_dim, decoder.head_dim), decoder.windows, None
        layers = decoder.layers
    else:
        network = any_decoder.load_network(target, torch.bfloat16, CPU, MASKED)
        kept, windows, past, layers = LayerKv(2, 16, 16), (), any_decoder._NoPast(), 3
    plan, _, _ = plan_sequences(given, blocks, wanted, best)
    with fake_cuda(monkeypatch):
        pool = KvPool([kept] * layers, blocks=blocks, block=BLOCK, dtype=torch.bfloat16, device=CUDA)
        own = ForwardRunner(
            place(network),
            pool,
            windows=windows,
            device=CUDA,
            kernel=attend_pages,
            past=past,
            captures=False,
        )
        own.run(plan)
        with counting() as counts:
            own.run(plan)
    return counts, layers


FEW: Sequences = [(40, 48), (10, 48)]
MANY: Sequences = [(7 * slot, 1 + slot % 5) for slot in range(32)]
"""32 sequences of mixed rows, 94 together; FEW are two with 96: both are filled up to 96 rows."""


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "olmo3"])
def test_a_round_on_cuda_launches_no_more_for_more_sequences_and_waits_once(tmp_path, monkeypatch, name):
    target = prepare(tmp_path, name)
    with monkeypatch.context() as patch:
        few, layers = run_on_fake_cuda(patch, target, name, FEW, 200)
    with monkeypatch.context() as patch:
        many, _ = run_on_fake_cuda(patch, target, name, MANY, 200)
    assert few.waits == many.waits == ["an event"]
    assert Counter(many.operations) == Counter(few.operations)
    assert Counter(many.operations)["flex_attention"] == layers


def test_what_a_round_on_cuda_allocates_does_not_grow_with_the_kv_cache(tmp_path, monkeypatch):
    target = prepare(tmp_path, "llama")
    made = []
    for blocks in (200, 20_000):
        with monkeypatch.context() as patch:
            made.append(run_on_fake_cuda(patch, target, "llama", MANY, blocks)[0].allocated_bytes)
    assert made[0] == made[1]


@pytest.mark.parametrize("wanted", [1, 3])
def test_nothing_but_the_wanted_rows_of_logits_comes_back_from_cuda(tmp_path, monkeypatch, wanted):
    target = prepare(tmp_path, "llama")
    counts, _ = run_on_fake_cuda(monkeypatch, target, "llama", MANY, 200, wanted)
    rows = sum(min(wanted, rows) for _, rows in MANY)
    assert counts.returned_bytes == 4 * rows * read_decoder(target).vocabulary_size
    assert counts.returns == 1


@pytest.mark.parametrize("best", [1, 20])
def test_of_rows_whose_best_logits_are_enough_these_alone_come_back_from_cuda_in_one_copy(tmp_path, monkeypatch, best):
    """In four bytes each, with their ids and a mass. The host waits once, as before, for any number of sequences."""
    target = prepare(tmp_path, "llama")
    for given_ in (FEW, MANY):
        with monkeypatch.context() as patch:
            counts, _ = run_on_fake_cuda(patch, target, "llama", given_, 200, 1, [best])
        assert counts.returned_bytes == 4 * (2 * best + 1) * len(given_)
        assert counts.returns == 1
        assert counts.waits == ["an event"]


def test_beside_others_whole_rows_come_back_in_one_copy_more_and_the_host_waits_once(tmp_path, monkeypatch):
    target = prepare(tmp_path, "llama")
    counts, _ = run_on_fake_cuda(monkeypatch, target, "llama", MANY, 200, 1, [1, 0, 20, 1])
    assert counts.returned_bytes == 4 * (8 * read_decoder(target).vocabulary_size + 24 * (2 * 20 + 1))
    assert counts.returns == 2
    assert counts.waits == ["an event"]


def test_a_round_launches_no_more_for_more_sequences_on_the_cpu(tmp_path):
    """The same, counted by torch's profiler as operations run."""
    model: Any = ADAPTER.load(prepare(tmp_path, "llama"), replace(OPTIONS, kv_cache_bytes=16 << 20), silent)
    own = model._runner
    forwards = FlexForwards(own.compute, own._pool, attend_pages, windows=own._windows, device=CPU)
    assert own._pool.blocks > 126
    launched = []
    for given_ in (FEW, MANY):
        plan, _, _ = plan_sequences(given_, own._pool.blocks - 2)
        with torch.inference_mode(), profile() as seen:
            forwards.run(plan)
        launched.append(Counter(event.name for event in seen.events() if event.name.startswith(("aten::", "mkldnn"))))
    assert launched[0] == launched[1]
    model.close()


@pytest.mark.parametrize("fails", [False, True])
def test_where_no_kernel_is_compiled_a_line_says_so_and_sequences_take_turns(monkeypatch, caplog, fails):
    def compile_or_fail(function: Any, **_: Any) -> Any:
        def attend(*args: Any, **options: Any) -> Any:
            if fails:
                raise RuntimeError("no triton\nat all")
            return function(*args, **options)

        return attend

    monkeypatch.setattr(torch, "compile", compile_or_fail)
    with fake_cuda(monkeypatch):
        pool = KvPool([LayerKv(2, 16, 16)], blocks=4, block=BLOCK, dtype=torch.bfloat16, device=CUDA)
        kernel = choose_kernel(pool, 3)
    assert (kernel is None) is fails
    assert ("RuntimeError: no triton" in caplog.text) is fails
    assert (
        choose_kernel(KvPool([LayerKv(2, 16, 16)], blocks=4, block=BLOCK, dtype=torch.float32, device=CPU), 3) is None
    )


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton comes with torch for CUDA alone")
@pytest.mark.parametrize("interpret", ["0", "1"])
def test_the_kernel_that_torch_writes_for_cuda_is_compiled_and_computes_the_same(interpret):
    """Without a device: as triton interprets it, and as machine code for a H100's kind."""
    command = [sys.executable, "-m", "tests.support.triton_kernel"]
    subprocess.run(command, check=True, env=os.environ | {"TRITON_INTERPRET": interpret})
