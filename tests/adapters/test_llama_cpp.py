"""llama.cpp's own: what it computes, how contexts grow, what a copy costs, and what becomes of wrong files."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from functools import partial

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from adapters.contract import (
    AdapterUnavailable,
    BlockRules,
    CapacityError,
    ModelRefused,
    Precision,
    RuntimeFailed,
    Segment,
    Unsupported,
    silent,
)
from adapters.llama_cpp import fork, library
from adapters.llama_cpp.adapter import LlamaCppAdapter
from adapters.llama_cpp.model import CopiedBlocks
from adapters.llama_cpp.state import read_format
from adapters.model_source import resolve
from adapters.model_store import ModelStore
from orchestrator.clock import SystemClock
from orchestrator.worker.measuring.steps import measure_steps
from tests.support.model_rows import loads_models
from tests.support.prepared_models import load_small, prepare_beside
from tests.support.tiny_gguf import Tiny, logits, write, write_file

tiny = partial(Tiny, hidden=128, heads=2, kv_heads=1, head_dim=64)
ADAPTER = LlamaCppAdapter()
MODELS = {
    "llama": tiny("llama"),
    "llama-tied-q8": tiny("llama", tied=True, kind=Kind.Q8_0),
    "llama-q4": tiny("llama", kind=Kind.Q4_0),
    "qwen2": tiny("qwen2", bias=True, kind=Kind.Q8_0),
    "qwen3-f32": tiny("qwen3", qk_norm=True, tied=True),
}


prepare, load = partial(prepare_beside, ADAPTER), partial(load_small, ADAPTER)


@loads_models("llama_cpp", "GGUF", {name: shape.family for name, shape in MODELS.items()}, partial(write_file, MODELS))
@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_a_tiny_model_computes_what_the_reference_computes(tmp_path, shape):
    arrays = write(tmp_path / "tiny.gguf", shape)
    model = load(prepare(tmp_path / "tiny.gguf"))
    tokens = [(5 * i * i + 3 * i + 1) % shape.vocabulary for i in range(40)]
    expected = logits(shape, arrays, tokens)
    model.forward([Segment(1, 0, tokens[:30], (0, 0))])
    rows = model.forward([Segment(1, 30, tokens[30:], (0, 10))]).logits
    # Products of quantised weights quantise their input to 8 bits too, and the KV cache has 16 bits.
    tolerance = 5e-3 if shape.kind is Kind.F32 else 0.05
    assert np.abs(rows - expected[30:]).max() <= tolerance * np.abs(expected).max()
    assert model.capabilities.weights == shape.kind.name
    model.close()


def test_a_sequence_that_outgrows_its_context_keeps_its_bits(tmp_path):
    """A context has multiples of 256 positions; each larger one takes over what the one before it held."""
    write(tmp_path / "tiny.gguf", tiny("llama", context=1024))
    model = load(prepare(tmp_path / "tiny.gguf"))
    tokens = [(7 * i * i + i) % 64 for i in range(700)]
    whole = model.forward([Segment(0, 0, tokens[:500], (0, 500))]).logits.copy()
    rest = model.forward([Segment(0, 500, tokens[500:], (0, 200))]).logits.copy()
    whole = np.concatenate([whole, rest])
    held, rows = 0, []
    for count in [255, 1, 1, 254, 2, 100, 87]:
        rows.append(model.forward([Segment(1, held, tokens[held : held + count], (0, count))]).logits.copy())
        held += count
    assert np.array_equal(np.concatenate(rows).view(np.uint32), whole.view(np.uint32))
    model.close()


def test_blocks_of_one_system_prompt_are_counted_for_each_who_has_a_copy(tmp_path):
    write(tmp_path / "tiny.gguf", tiny("llama", context=512))
    model = load(prepare(tmp_path / "tiny.gguf"))
    tokens = [(7 * i * i + i) % 64 for i in range(100)]
    model.forward([Segment(0, 0, tokens, (0, 0))])
    model.share(0, tokens)
    free = model.free_blocks()
    assert model.attach(1, tokens) == model.attach(2, tokens) == 96
    assert model.free_blocks() == free - 6
    for slot in range(3):
        model.release(slot)
    assert model.free_blocks() == model.capabilities.total_blocks
    assert model.attach(3, tokens) == 96  # what nobody has any more is taken, not copied
    assert model.free_blocks() == model.capabilities.total_blocks - 3
    model.close()


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_sequences_beside_one_another_have_the_bits_of_each_alone(tmp_path, shape):
    """In one pass, where the library was built here; one after another else. A pass has at most 24 rows."""
    write(tmp_path / "tiny.gguf", shape)
    model = load(prepare(tmp_path / "tiny.gguf"), slots=8, max_batch_rows=512)
    texts = [[(7 * i * i + 3 * slot) % shape.vocabulary for i in range(60)] for slot in range(8)]
    held = [5 * slot for slot in range(8)]
    for slot in range(1, 8):
        model.forward([Segment(slot, 0, texts[slot][: held[slot]], (0, 0))])

    def take(slot: int, rows: int, first: int) -> Segment:
        return Segment(slot, held[slot], texts[slot][held[slot] : held[slot] + rows], (first, rows))

    for counts in ([1] * 8, [3, 1, 4, 1, 5, 9, 2, 6], [25, 2, 24, 1, 1, 2, 3, 1], [2, 1, 0, 0, 0, 0, 0, 8]):
        for last_alone in (False, True):
            batch = [take(slot, rows, last_alone * (rows - 1)) for slot, rows in enumerate(counts) if rows]
            alone = [model.forward([segment]).logits.copy() for segment in batch]
            together = model.forward(batch).logits
            assert np.array_equal(together.view(np.uint32), np.concatenate(alone).view(np.uint32)), counts
    model.close()


def test_sequences_of_several_models_take_turns_where_the_library_has_too_few_contexts(tmp_path):
    write(tmp_path / "tiny.gguf", tiny("llama"))
    prepared = prepare(tmp_path / "tiny.gguf")
    models = [load(prepared, slots=70, max_batch_rows=512) for _ in range(3)]
    slots = models[0].capabilities.slots
    assert slots < 70 < len(models) * slots
    texts = [[(7 * i * i + slot) % 64 for i in range(9)] for slot in range(slots)]
    expected = [models[0].forward([Segment(0, 0, text, (8, 9))]).logits.copy() for text in texts]
    models[0].release(0)
    for model in models:
        model.forward([Segment(slot, 0, text[:5], (0, 0)) for slot, text in enumerate(texts)])
    for model in models:
        rows = model.forward([Segment(slot, 5, text[5:], (3, 4)) for slot, text in enumerate(texts)]).logits
        assert np.array_equal(rows.view(np.uint32), np.concatenate(expected).view(np.uint32))
    for model in models:
        model.close()


def test_a_profile_measures_no_more_sequences_than_have_contexts_and_copies_no_cache_to_and_fro(tmp_path, monkeypatch):
    write(tmp_path / "tiny.gguf", tiny("llama", context=1024))
    model = load(prepare(tmp_path / "tiny.gguf"), slots=33, max_batch_rows=512)
    written: list[int] = []
    write_state = model._library.write_state

    def count(context: int, state: np.ndarray) -> None:
        written.append(context)
        write_state(context, state)

    monkeypatch.setattr(model._library, "write_state", count)
    measure_steps(model, SystemClock(), silent, budget_s=0.1)
    assert len(written) < model.capabilities.slots // 2  # as contexts grow, and not at each forward
    model.close()


class CopiedBlocksMachine(RuleBasedStateMachine):
    """Slots take, share, copy and free blocks in any order: each block has one holder, and none is lost."""

    SLOTS, BLOCKS, SIZE = 3, 9, 2

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: list[int] = []
        rules = BlockRules(self.BLOCKS, self.SIZE, self.SLOTS, copies=True)
        self.pool = CopiedBlocks(rules, self.forgotten.append)
        self.held: dict[int, list[int]] = {}
        self.kept: dict[int, tuple[int, ...]] = {}

    @rule(slot=st.integers(0, SLOTS - 1), text=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def begin_or_go_on(self, slot: int, text: list[int]) -> None:
        if slot not in self.held:
            positions = self.pool.attach(slot, text)
            assert positions < len(text)
            assert [self.kept[block] for block in self.pool.sources] == self.cut(text[:positions]) or not positions
            if positions:
                self.hold(slot, text[:positions])
        held = self.pool.count_cached_positions(slot)
        more = text[held:] if slot not in self.held or not held else text
        if not more:
            return
        try:
            self.pool.reserve([Segment(slot, held, more, (0, 0))])
        except CapacityError:
            assert self.pool.free < self.BLOCKS
            return
        self.hold(slot, self.held.get(slot, []) + more)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.share(slot, self.held[slot])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), bad=st.booleans())
    def end(self, data: st.DataObject, bad: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        text = self.held.pop(slot)
        (self.pool.discard if bad else self.pool.release)(slot)
        if bad and slot not in self.held:
            shared = [other for other in self.held.values() if other[: self.SIZE] == text[: self.SIZE]]
            if not shared and len(text) > self.SIZE:
                assert self.pool.attach(slot, [*text, 0]) in range(0, len(text) + 1, self.SIZE)
                self.pool.release(slot)

    def cut(self, text: list[int]) -> list[tuple[int, ...]]:
        return [tuple(text[at : at + self.SIZE]) for at in range(0, len(text), self.SIZE)]

    def hold(self, slot: int, text: list[int]) -> None:
        self.held[slot] = text
        for block, part in zip(self.pool.table(slot, len(text)), self.cut(text), strict=True):
            self.kept[block] = part

    @invariant()
    def each_block_has_one_holder(self) -> None:
        held = [block for slot, text in self.held.items() for block in self.pool.table(slot, len(text))]
        assert len(held) == len(set(held))
        assert self.pool.free == self.BLOCKS - len(held)


TestCopiedBlocks = CopiedBlocksMachine.TestCase
TestCopiedBlocks.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_state_is_split_and_joined_again_byte_for_byte(tmp_path):
    write(tmp_path / "tiny.gguf", tiny("llama"))
    model = load(prepare(tmp_path / "tiny.gguf"))
    model.forward([Segment(0, 0, list(range(20)), (0, 0))])
    state = model._library.read_state(model._sequences[0].context)
    form = read_format(state)
    assert np.array_equal(form.join(form.split(state)), state)
    for damaged in (state[:40], np.concatenate([state, np.ones(4, np.uint8)])):
        with pytest.raises(RuntimeFailed, match="state"):
            read_format(damaged)
    model.close()


def test_what_is_prepared_is_a_link_and_its_file_is_watched(tmp_path):
    source = tmp_path / "tiny.gguf"
    write(source, tiny("llama"))
    store = ModelStore(tmp_path / "store", disk_free=lambda _: 2 << 20)
    file = resolve(str(source), tmp_path)
    prepared = store.prepare(file, ADAPTER, silent, needed_bytes=ADAPTER.prepared_bytes)
    assert sum(path.lstat().st_size for path in prepared.iterdir()) < 1 << 20
    load(prepared).close()
    assert store.prepare(file, ADAPTER, silent) == prepared
    write(source, tiny("llama", seed=6))
    again = store.prepare(resolve(str(source), tmp_path), ADAPTER, silent)
    assert again != prepared
    load(again).close()


def test_other_formats_devices_and_files_are_refused_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "find_any_mainline", lambda: None)
    source = tmp_path / "tiny.gguf"
    write(source, tiny("llama"))
    prepared = prepare(source)
    with pytest.raises(Unsupported, match=r"weights in int8: llama\.cpp runs a file's own"):
        ADAPTER.recipe(Precision.INT8)
    with pytest.raises(Unsupported, match=r"no device 'GPU' here; it has CPU"):
        load(prepared, device="GPU")
    with pytest.raises(Unsupported, match="fp16 here"):
        load(prepared, kv_cache=Precision.INT8)
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelRefused, match=r"model is no GGUF file, and llama_cpp reads nothing else"):
        ADAPTER.prepare(tmp_path / "model", tmp_path, silent)
    (tmp_path / "factors").mkdir()
    write(tmp_path / "factors" / "llama3.gguf", tiny("llama", rope_factors=True))
    with pytest.raises(ModelRefused, match=r"llama3\.gguf: .* passes over rope_freqs\.weight"):
        load(prepare(tmp_path / "factors" / "llama3.gguf"))
    whole = source.read_bytes()
    source.write_bytes(whole[:-4096])
    with pytest.raises(ModelRefused, match=r"tiny\.gguf: .* does not load it: .*(corrupted|incomplete|within)"):
        load(prepared)


def test_a_missing_or_other_version_is_answered_with_the_install_command(monkeypatch):
    monkeypatch.setattr(fork, "version", lambda _: "9.9")
    with pytest.raises(AdapterUnavailable, match=r"9\.9 .* knows 0\.1\.5: outrider extras install llama"):
        fork.ForkLibrary()
    monkeypatch.setitem(sys.modules, "ik_llama_cpp", None)
    with pytest.raises(AdapterUnavailable, match=r"not installed .*outrider extras install llama"):
        fork.ForkLibrary()


def test_a_context_that_finds_no_memory_costs_its_forward_and_nothing_else(tmp_path):
    """The process's address space is bounded behind the load, so that the library's own allocation fails."""
    source = tmp_path / "tiny.gguf"
    write(source, tiny("llama", layers=8, context=1 << 17))
    script = f"""
        import resource
        from pathlib import Path
        import numpy as np, psutil
        from adapters.contract import LoadOptions, OutOfMemory, Segment
        from adapters.llama_cpp.adapter import LlamaCppAdapter
        adapter = LlamaCppAdapter()
        model = adapter.load(Path({str(prepare(source))!r}), LoadOptions(slots=2, kv_cache_bytes=4 << 30, threads=1,
                             max_batch_rows=1 << 17), lambda stage, fraction: None)
        before = model.forward([Segment(0, 0, list(range(40)), (39, 40))]).logits.copy()
        room = psutil.Process().memory_info().vms + (64 << 20)
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))
        try:
            model.forward([Segment(1, 0, [5] * (1 << 16), (0, 0))])
        except OutOfMemory as error:
            assert error.can_go_on, error
            print(error)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        model.release(1)
        again = model.forward([Segment(0, 39, [39], (0, 1))]).logits
        assert np.array_equal(again, before)
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert "ran out of memory" in process.stdout
