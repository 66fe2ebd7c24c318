"""Hybrids and recurrent models on llama.cpp: their state is never cut, and their text is the library's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from adapters.contract import (
    AdapterError,
    Exactness,
    ForkableKv,
    LoadOptions,
    MovableKv,
    OutOfMemory,
    Segment,
    Unsupported,
    list_classes,
    silent,
)
from adapters.invariance import find_variance
from adapters.libllama import find_any_mainline, find_library
from adapters.llama_cpp.adapter import LlamaCppAdapter
from adapters.llama_cpp.library import load_library
from adapters.llama_cpp.native import NativeLibrary
from tests.support.model_rows import loads_models
from tests.support.tiny_llama_files import RECURRENT, TOKENS, write_llama_file

FORK_RUNS = ("qwen35", "qwen3next")
LIBRARIES = ("as installed", "mainline")


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    try:
        place = find_library() if request.param == LIBRARIES[0] else find_any_mainline()
        if place is None:
            pytest.skip("no package with mainline is installed")
        return load_library(place)
    except AdapterError as error:
        pytest.skip(str(error))


@pytest.fixture(params=RECURRENT)
def architecture(request: pytest.FixtureRequest, library: NativeLibrary) -> str:
    if library.has_faults and request.param not in FORK_RUNS:
        pytest.skip(f"{library.name} does not run it")
    return str(request.param)


def prepare(library: NativeLibrary, directory: Path, architecture: str, **changes):
    adapter, prepared = LlamaCppAdapter(lambda: library), directory / "prepared"
    prepared.mkdir()
    adapter.prepare(write_llama_file(directory, architecture, **changes), prepared, silent)
    return adapter, prepared


def load(library: NativeLibrary, directory: Path, architecture: str, **options):
    """Load a tiny model in the first class that keeps its bits on this processor."""
    adapter, prepared = prepare(library, directory, architecture)
    wanted = LoadOptions(**({"slots": 4, "kv_cache_bytes": 16 << 20, "threads": 1} | options))
    for tier in list_classes(adapter, prepared, wanted):
        model = adapter.load(prepared, replace(wanted, numerical_class=tier[0]), silent)
        if not find_variance(model):
            return model
        model.close()
    return pytest.fail("in no numerical class a row keeps its bits")


def make_text(count: int, seed: int = 0) -> list[int]:
    return [(7 * place * place + 11 * place + 3 + 31 * seed) % len(TOKENS) for place in range(count)]


def decode_alone(library: NativeLibrary, file: Path, prompt: list[int], count: int) -> list[int]:
    """Return what the library says greedily, in a context of its own, a token a call."""
    model = library.load_model(file, "CPU", 0, lambda fraction: True, repack=False)
    context, batch = library.open_context(model, 512, 1, 1, "CPU"), library.new_batch(1)
    text = list(prompt)
    for place in range(len(prompt) + count - 1):
        assert library.decode(context, batch, [text[place]], place, range(1)) == 0
        if place >= len(prompt) - 1:
            text.append(int(library.read_logits(context, 1, len(TOKENS))[0].argmax()))
    library.free_batch(batch)
    library.close_context(context)
    library.close_model(model)
    return text[len(prompt) :]


@loads_models("llama_cpp", "GGUF", RECURRENT, write_llama_file, needs="xllamacpp")
def test_the_greedy_text_is_the_librarys_own_however_many_are_decoded(tmp_path, library, architecture):
    """Prompts come in chunks, and one of them outgrows its context; each says what it says alone, a token a call."""
    model = load(library, tmp_path, architecture)
    prompts = [make_text(length, seed) for seed, length in enumerate((5, 240, 33))]
    expected = [decode_alone(library, tmp_path / f"tiny-{architecture}.gguf", prompt, 30) for prompt in prompts]
    assert len({token for text in expected for token in text}) > 5
    said: list[list[int]] = [[] for _ in prompts]
    texts = [list(prompt) for prompt in prompts]
    step = 0
    while min(map(len, said)) < 30:
        step += 1
        batch = []
        for slot, text in enumerate(texts):
            held = model.count_cached_positions(slot)
            tokens = text[held : held + (40 if held < len(prompts[slot]) else 1)]
            if len(said[slot]) < 30 and slot <= step:
                batch.append(Segment(slot, held, tokens, (len(tokens) - 1, len(tokens))))
        rows = model.forward(batch).logits
        for segment, row in zip(batch, rows, strict=True):
            if model.count_cached_positions(segment.slot) == len(texts[segment.slot]):
                said[segment.slot].append(int(row.argmax()))
                texts[segment.slot].append(said[segment.slot][-1])
    model.close()
    assert said == expected


def test_a_slot_goes_on_where_it_ends_or_begins_anew(tmp_path, library, architecture):
    model = load(library, tmp_path, architecture)
    assert not model.capabilities.rewinds
    assert not isinstance(model, ForkableKv | MovableKv)
    tokens = make_text(60)
    whole = model.forward([Segment(0, 0, tokens, (0, 60))]).logits.copy()
    for start in (1, 30, 59):
        with pytest.raises(Unsupported, match=f"holds the state of 60 tokens, which cannot be cut to {start}"):
            model.forward([Segment(0, start, tokens[start:], (0, 1))])
    assert model.count_cached_positions(0) == 60
    again = model.forward([Segment(0, 0, tokens, (0, 60))]).logits.copy()
    assert np.array_equal(again.view(np.uint32), whole.view(np.uint32))
    model.share(0, tokens)
    assert model.attach(1, tokens) == 0
    with pytest.raises(Unsupported, match="a prefix is attached to a free one"):
        model.attach(0, tokens)
    model.discard(0)
    assert model.count_cached_positions(0) == 0
    assert model.free_blocks() == model.capabilities.total_blocks
    model.close()


def test_no_class_pads_and_the_last_one_keeps_bits(tmp_path, library, architecture):
    """Whatever else is in a forward, and in however many chunks a text comes."""
    adapter, prepared = prepare(library, tmp_path, architecture)
    options = LoadOptions(slots=5, kv_cache_bytes=16 << 20, threads=1)
    tiers = list_classes(adapter, prepared, options)
    assert all(
        kind.segment_rows == kind.output_rows == 1 and kind.fixed_width in (0, 1) for tier in tiers for kind in tier
    )
    model = adapter.load(prepared, replace(options, numerical_class=tiers[-1][0]), silent)
    assert find_variance(model) == ""
    model.close()
    assert [len(tier) for tier in list_classes(adapter, prepared, replace(options, exactness=Exactness.KERNEL))] == [1]
    padding = list_classes(adapter, prepared, options)[0][0]
    with pytest.raises(Unsupported, match="padding would be written into a recurrent state"):
        adapter.load(prepared, replace(options, numerical_class=replace(padding, segment_rows=2)), silent)


def test_more_sequences_than_there_are_contexts_set_their_states_aside(tmp_path, library, architecture, monkeypatch):
    monkeypatch.setattr(type(library), "most_contexts", len(library._open) + 2)
    model = load(library, tmp_path, architecture, slots=5, max_batch_rows=512)
    texts = [make_text(9, seed) for seed in range(5)]
    expected = []
    for text in texts:
        expected.append(model.forward([Segment(0, 0, text, (8, 9))]).logits.copy())
        model.release(0)
    model.forward([Segment(slot, 0, text[:5], (0, 0)) for slot, text in enumerate(texts)])
    assert len(library._open) <= type(library).most_contexts
    rows = model.forward([Segment(slot, 5, text[5:], (3, 4)) for slot, text in enumerate(texts)]).logits
    assert np.array_equal(rows.view(np.uint32), np.concatenate(expected).view(np.uint32))
    model.close()


def test_states_take_at_most_half_of_the_memory_and_bound_the_slots(tmp_path, library):
    adapter, prepared = prepare(library, tmp_path, "qwen35")
    options = LoadOptions(slots=16, kv_cache_bytes=1 << 20, threads=1)
    model = adapter.load(prepared, options, silent)
    caps = model.capabilities
    assert caps.slots == 3  # 137,000 bytes each
    assert caps.total_blocks * caps.block_tokens * model.spec.bytes_per_token < 1 << 20
    model.close()
    with pytest.raises(OutOfMemory, match=r"a state of \d+ bytes.*limits\.kv_cache higher"):
        adapter.load(prepared, replace(options, kv_cache_bytes=200_000), silent)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q4_0])
def test_other_formats_of_weights_keep_bits_in_some_class(tmp_path, library, kind):
    adapter, prepared = prepare(library, tmp_path, "qwen35", kind=kind)
    options = LoadOptions(slots=5, kv_cache_bytes=16 << 20, threads=1)
    model = adapter.load(
        prepared, replace(options, numerical_class=list_classes(adapter, prepared, options)[-1][0]), silent
    )
    assert find_variance(model) == ""
    model.close()
