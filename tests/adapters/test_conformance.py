"""One suite over every adapter: what the contract promises, each promise as a test that could fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters import registry
from adapters.contract import (
    Adapter,
    CapacityError,
    DeviceLost,
    LoadedModel,
    LoadOptions,
    ModelRefused,
    Segment,
    StaticShapes,
    Unsupported,
)
from adapters.hf_directory import model_files
from adapters.invariance import measure_row_invariance
from adapters.model_source import ModelSource
from adapters.model_store import ModelStore
from adapters.variant import Variant
from device_profiles.profile import Exactness, Precision
from tests.support import tiny_models

ADAPTERS = [
    pytest.param("simulated", id="simulated"),
    pytest.param("openvino_rt", id="openvino_rt", marks=pytest.mark.model),
    pytest.param("onnx_rt", id="onnx_rt", marks=pytest.mark.model),
    pytest.param("torch_device", id="torch_device", marks=pytest.mark.model),
    # A model of tests/support/tiny_models.py behind the slash: sliding windows, and layers without.
    pytest.param("openvino_rt/gemma3", id="openvino_rt-gemma3"),
    pytest.param("onnx_rt/gemma3", id="onnx_rt-gemma3"),
    pytest.param("torch_device/gemma2", id="torch_device-gemma2"),  # attention scores softly capped
    # Graphs of fixed shape, as an NPU runs them.
    pytest.param("openvino_rt/llama/static", id="openvino_rt-llama-static"),
    pytest.param("openvino_rt/gemma3/static", id="openvino_rt-gemma3-static"),
    # Behind the at sign: weights in another format than the file's.
    pytest.param("openvino_rt/llama3@int8", id="openvino_rt-int8"),
    pytest.param("openvino_rt/llama3@int4", id="openvino_rt-int4"),
    pytest.param("onnx_rt/llama3@int8", id="onnx_rt-int8"),
    pytest.param("onnx_rt/llama3@int4", id="onnx_rt-int4"),
]
DEVICES = {"simulated": "SIM", "openvino_rt": "CPU", "onnx_rt": "CPU", "torch_device": "CPU"}
SLOTS = 18
ROWS = 160


@dataclass(frozen=True)
class Prepared:
    """A model as an adapter has prepared it, and the shapes that it is loaded with."""

    adapter: Adapter
    path: Path
    static: StaticShapes


def silent(stage: str, fraction: float) -> None:
    """Progress that nobody watches."""


@pytest.fixture(scope="module", params=ADAPTERS)
def prepared(request, tmp_path_factory) -> Prepared:
    """A prepared model and its adapter."""
    rest, _, weights = request.param.partition("@")
    name, tiny, static = [*rest.split("/"), "", ""][:3]
    shapes = StaticShapes(on=bool(static), prefill_rows=32, verify_rows=(1, 4))
    adapter = registry.get_for(name, DEVICES[name], shapes)
    root = tmp_path_factory.mktemp(name)
    if tiny:
        source = tiny_models.write_model(root / tiny, tiny, kind="BF16")
    elif name == "simulated":
        source = root / "script.txt"
        source.write_text("")
    else:
        source = request.getfixturevalue("default_model_path")
    files = model_files(source) if tiny else ()
    file = ModelSource(path=source, name="conformance", source=str(source), files=files)
    recipe = Variant(adapter, Precision(weights) if weights else None)
    return Prepared(adapter, ModelStore(root / "store").prepare(file, recipe, silent), shapes)


def load(prepared: Prepared, **options) -> LoadedModel:
    chosen: dict[str, Any] = {
        "device": DEVICES[prepared.adapter.name],
        "static": prepared.static,
        "slots": SLOTS,
        "max_batch_rows": ROWS,
        "kv_cache_bytes": 400 << 20,  # the default model's whole context, in fp32
    }
    return prepared.adapter.load(prepared.path, LoadOptions(**(chosen | options)), silent)


@pytest.fixture(scope="module")
def model(prepared) -> Iterator[LoadedModel]:
    loaded = load(prepared)
    yield loaded
    loaded.close()


@pytest.fixture(autouse=True)
def _all_free(request) -> Iterator[None]:
    yield
    if "model" in request.fixturenames:
        model = request.getfixturevalue("model")
        for slot in range(model.capabilities.slots):
            model.release(slot)
        assert model.free_blocks() == model.capabilities.total_blocks


def text(model: LoadedModel, count: int, seed: int = 0) -> list[int]:
    most = min(256, model.spec.vocabulary_size)
    return [int(token) for token in np.random.default_rng(seed).integers(3, most, count)]


def bits(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.uint32)


def run(model: LoadedModel, slot: int, tokens: list[int], chunks: list[int], start: int = 0) -> np.ndarray:
    """All rows of `tokens`, fed in chunks."""
    rows = []
    for count in chunks:
        segment = Segment(slot, start, tokens[start : start + count], (0, count))
        rows.append(model.forward([segment]).logits.copy())
        start += count
    assert start == len(tokens)
    return np.concatenate(rows)


def pieces(rows: int) -> list[int]:
    """Rows in as few forwards as they fit in."""
    return [ROWS] * (rows // ROWS) + [rows % ROWS] * (rows % ROWS > 0)


def test_forward_returns_the_rows_asked_for(model):
    tokens = text(model, 10)
    every = run(model, 0, tokens, [10])
    assert every.shape == (10, model.spec.vocabulary_size)
    assert every.dtype == np.float32
    some = model.forward([Segment(1, 0, tokens, (4, 7))])
    assert np.array_equal(bits(some.logits), bits(every[4:7]))
    assert some.device_ms >= 0.0
    none = model.forward([Segment(2, 0, tokens, (0, 0)), Segment(3, 0, tokens, (9, 10))])
    assert np.array_equal(bits(none.logits[-1:]), bits(every[9:]))
    assert model.held(2) == 10


def test_rollback_leaves_no_trace_of_what_was_rejected(model):
    tokens, wrong = text(model, 40), text(model, 12, seed=9)
    expected = run(model, 0, tokens, [40])
    run(model, 1, tokens[:20], [20])
    model.forward([Segment(1, 20, wrong, (0, 0))])
    assert model.held(1) == 32
    again = run(model, 1, tokens, [6, 14], start=20)
    assert np.array_equal(bits(again), bits(expected[20:]))
    assert model.held(1) == 40
    deeper = run(model, 1, tokens, [37], start=3)
    assert np.array_equal(bits(deeper), bits(expected[3:]))


def test_release_frees_blocks_and_forgets(model):
    tokens = text(model, 70)
    first = run(model, 4, tokens, [70])
    assert model.free_blocks() < model.capabilities.total_blocks
    model.release(4)
    model.release(4)
    assert model.held(4) == 0
    assert model.free_blocks() == model.capabilities.total_blocks
    with pytest.raises(Unsupported):
        model.forward([Segment(4, 70, tokens[:2], (0, 1))])
    assert np.array_equal(bits(run(model, 4, tokens, [70])), bits(first))


@pytest.mark.parametrize(
    "segment",
    [
        Segment(SLOTS, 0, [5], (0, 1)),
        Segment(-1, 0, [5], (0, 1)),
        Segment(0, 1, [5], (0, 1)),
        Segment(0, -1, [5], (0, 1)),
        Segment(0, 0, [], (0, 0)),
        Segment(0, 0, [5, 6], (1, 3)),
        Segment(0, 0, [5, 6], (2, 1)),
        Segment(0, 0, [5] * (ROWS + 1), (0, 1)),
    ],
    ids=["slot", "negative-slot", "gap", "negative", "empty", "rows-behind", "rows-backwards", "too-many"],
)
def test_a_batch_outside_the_capabilities_is_unsupported_and_changes_nothing(model, segment):
    before = model.free_blocks()
    with pytest.raises(Unsupported):
        model.forward([segment])
    with pytest.raises(Unsupported):
        model.forward([Segment(7, 0, [5, 6], (0, 1)), segment])
    assert model.held(7) == 0
    assert model.free_blocks() == before


def test_one_slot_twice_in_a_batch_is_unsupported(model):
    with pytest.raises(Unsupported):
        model.forward([Segment(0, 0, [5], (0, 1)), Segment(0, 0, [6], (0, 1))])
    with pytest.raises(Unsupported):
        model.forward([])


def test_a_full_pool_raises_before_anything_changes_and_serves_on_after_a_release(prepared):
    small = load(prepared, kv_cache_bytes=3 << 20)
    caps = small.capabilities
    room = caps.total_blocks * caps.block_tokens
    assert room < 200 * caps.block_tokens
    tokens = text(small, caps.block_tokens)
    for slot in range(min(SLOTS, caps.total_blocks)):
        held = 0
        while small.free_blocks() and held < 8 * caps.block_tokens and slot < SLOTS - 1:
            batch = [Segment(slot, held, tokens[: caps.block_tokens // 2], (0, 0))]
            if small.blocks_needed(batch) > small.free_blocks():
                break
            small.forward(batch)
            held += caps.block_tokens // 2
    last = SLOTS - 1
    while small.free_blocks():
        small.forward([Segment(last, small.held(last), tokens[: caps.block_tokens // 2], (0, 0))])
    before = {slot: small.held(slot) for slot in range(SLOTS)}
    growing = Segment(last, small.held(last), tokens * 2, (0, 1))
    assert small.blocks_needed([growing]) > 0
    with pytest.raises(CapacityError):
        small.forward([growing])
    assert {slot: small.held(slot) for slot in range(SLOTS)} == before
    small.release(0)
    small.release(1)
    small.release(2)
    small.forward([Segment(0, 0, tokens[:4], (3, 4))])
    small.close()


def test_chunked_prefill_equals_whole(model):
    tokens = text(model, 150)
    whole = run(model, 0, tokens, [150])
    for slot, chunks in enumerate(([64, 64, 22], [149, 1], [1, 149], [75, 75], [33] * 4 + [18]), start=1):
        assert np.array_equal(bits(run(model, slot, tokens, chunks)), bits(whole)), chunks


def test_row_invariance_over_depth(model):
    tokens = text(model, 96)
    whole = run(model, 0, tokens, [96])
    for width in (1, 2, 3, 4, 5, 6, 8, 12, 16):
        chunks = [width] * (96 // width) + ([96 % width] if 96 % width else [])
        assert np.array_equal(bits(run(model, 1, tokens, chunks)), bits(whole)), width
        model.release(1)


@pytest.mark.parametrize("sequences", [2, 5, 8, 16])
def test_row_invariance_beside_other_sequences(model, sequences):
    """Every sequence decodes ragged beside the others and gets the bits that it gets alone."""
    lengths = [20 + 7 * index for index in range(sequences)]
    texts = [text(model, length, seed=index) for index, length in enumerate(lengths)]
    alone = []
    for slot in range(sequences):
        alone.append(run(model, slot, texts[slot], [ROWS] * (lengths[slot] // ROWS) + [lengths[slot] % ROWS]))
        model.release(slot)
    done = [0] * sequences
    got: list[list[np.ndarray]] = [[] for _ in range(sequences)]
    step = 0
    while any(done[s] < lengths[s] for s in range(sequences)):
        batch = []
        for s in range(sequences):
            count = min(1 + (s + step) % 5, lengths[s] - done[s])
            if count:
                batch.append(Segment(s, done[s], texts[s][done[s] : done[s] + count], (0, count)))
        rows = model.forward(batch).logits.copy()
        at = 0
        for segment in batch:
            got[segment.slot].append(rows[at : at + len(segment.tokens)])
            at += len(segment.tokens)
            done[segment.slot] += len(segment.tokens)
        step += 1
    for s in range(sequences):
        assert np.array_equal(bits(np.concatenate(got[s])), bits(alone[s])), s


def test_row_invariance_of_rows_that_stand_apart(model):
    """Behind a prompt: any number at a time, alone, beside others and beside a prefill of the other class."""
    if not model.capabilities.apart_tokens:
        pytest.skip("this runtime has one numerical class")
    tokens, prompt = text(model, 60), 23
    run(model, 0, tokens[:prompt], [prompt])
    expected = apart(model, tokens, prompt, [37])
    for chunks in ([1] * 37, [2] * 18 + [1], [5, 1, 16, 8, 7], [30, 7]):
        assert np.array_equal(bits(apart(model, tokens, prompt, chunks)), bits(expected)), chunks
        assert np.array_equal(bits(apart(model, tokens, prompt, chunks, beside=3)), bits(expected)), chunks
    got, bulk = [], text(model, 100, seed=5)
    alone = run(model, 1, bulk, [100])
    for index, start in enumerate(range(prompt, 60, 8)):
        part = tokens[start : start + 8]
        batch = [
            Segment(0, start, part, (0, len(part)), apart=True),
            Segment(2, index * 20, bulk[index * 20 :][:20], (0, 20)),
        ]
        rows = model.forward(batch).logits.copy()
        got.append(rows[: len(part)])
        assert np.array_equal(bits(rows[len(part) :]), bits(alone[index * 20 :][:20]))
    assert np.array_equal(bits(np.concatenate(got)), bits(expected))


def apart(model: LoadedModel, tokens: list[int], start: int, chunks: list[int], *, beside: int = 0) -> np.ndarray:
    """All rows from `start` on, apart; `beside` other sequences decode one apart row each."""
    others = text(model, 80, seed=1)
    for slot in range(3, 3 + beside):
        model.release(slot)
        model.forward([Segment(slot, 0, others[: 2 * slot], (0, 0))])
    rows = []
    for count in chunks:
        batch = [Segment(0, start, tokens[start : start + count], (0, count), apart=True)]
        for slot in range(3, 3 + beside):
            held = model.held(slot)
            batch.append(Segment(slot, held, others[held : held + 1], (0, 0), apart=True))
        rows.append(model.forward(batch).logits.copy())
        start += count
    return np.concatenate(rows)


def test_a_remembered_prefix_is_as_good_as_a_computed_one(model):
    size = model.capabilities.block_tokens
    tokens = text(model, 3 * size + 5)
    expected = run(model, 0, tokens, pieces(len(tokens)))
    assert model.attach(1, tokens) == 0  # nothing is remembered before it is shared
    model.share(0, tokens)
    free = model.free_blocks()
    assert model.attach(1, tokens) == 3 * size
    assert model.held(1) == 3 * size
    assert model.free_blocks() == free  # two slots, one copy
    again = run(model, 1, tokens, [2, 3], start=3 * size)
    assert np.array_equal(bits(again), bits(expected[3 * size :]))
    other = [*tokens[: 2 * size], *text(model, size, seed=4)]
    assert model.attach(2, other) == 2 * size
    rest = run(model, 2, other, pieces(size), start=2 * size)
    model.release(0)
    model.release(1)
    assert np.array_equal(bits(rest), bits(run(model, 3, other, pieces(len(other)))[2 * size :]))
    assert model.attach(4, tokens[: 3 * size]) == 2 * size  # the last token is always computed
    with pytest.raises(Unsupported):
        model.attach(4, tokens)
    with pytest.raises(Unsupported):
        model.forward([Segment(4, size, tokens[:2], (0, 1))])  # it would write into what others read


def test_a_prefix_outlives_its_slot_until_the_room_is_needed(prepared, model):
    caps = model.capabilities
    small = load(prepared, kv_cache_bytes=12 * caps.block_tokens * model.spec.bytes_per_token)
    caps = small.capabilities
    size, room = caps.block_tokens, caps.total_blocks
    first, second = text(small, 2 * size + 1, seed=1), text(small, 2 * size + 1, seed=2)
    expected = run(small, 0, first, pieces(len(first)))
    small.share(0, first)
    small.release(0)
    run(small, 0, second, pieces(len(second)))
    small.share(0, second)
    small.release(0)
    assert small.free_blocks() == room  # remembered blocks are free blocks
    assert small.attach(1, first) == 2 * size  # and used again, they are the younger ones
    assert np.array_equal(bits(run(small, 1, first, [1], start=2 * size)), bits(expected[2 * size :]))
    small.release(1)
    filler = text(small, size, seed=3)
    slot, taken = 2, 0
    while taken < room - 2:  # all but the two blocks of the younger prefix
        held = small.held(slot)
        if held >= 4 * size and slot < SLOTS - 1:
            slot, held = slot + 1, 0
        small.forward([Segment(slot, held, filler[: size - 2], (0, 0))])
        small.forward([Segment(slot, held + size - 2, filler[:2], (0, 0))])
        taken += 1
    assert small.attach(0, second) == 0
    assert small.attach(1, first) == 2 * size
    small.close()


def test_a_long_prefill_beside_a_decoding_sequence_changes_neither(model):
    short, long = text(model, 30), text(model, 140, seed=3)
    expected_short, expected_long = run(model, 0, short, [30]), run(model, 1, long, [140])
    model.release(0)
    model.release(1)
    run(model, 0, short[:29], [29])
    rows = model.forward([Segment(0, 29, short[29:], (0, 1)), Segment(1, 0, long, (0, 140))]).logits
    assert np.array_equal(bits(rows[:1]), bits(expected_short[29:]))
    assert np.array_equal(bits(rows[1:]), bits(expected_long))


def test_long_context_to_its_very_end(model):
    context = model.capabilities.max_context_tokens
    tokens = text(model, context)
    for start in range(0, context - ROWS, ROWS):
        model.forward([Segment(0, start, tokens[start : start + ROWS], (0, 0))])
    start = (context - 1) // ROWS * ROWS if context % ROWS else context - ROWS
    start = min(start, model.held(0))
    whole = run(model, 0, tokens[:context], [context - start], start=start)
    singles = run(model, 0, tokens[:context], [1, 1, 1], start=context - 3)
    assert np.array_equal(bits(singles), bits(whole[-3:]))
    assert model.held(0) == context
    with pytest.raises(Unsupported):
        model.forward([Segment(0, context, [5], (0, 1))])


def test_what_is_measured_is_what_is_stated(model):
    assert measure_row_invariance(model) is model.capabilities.row_invariant is True


def test_kernel_exactness_decodes_and_says_that_it_is_not_invariant(prepared):
    name = prepared.adapter.name
    loaded = load(prepared, exactness=Exactness.KERNEL)
    tokens = text(loaded, 20)
    rows = run(loaded, 0, tokens, [19, 1])
    assert np.isfinite(rows).all()
    if name != "simulated":
        assert loaded.capabilities.paid_rows == 1
        assert loaded.capabilities.row_invariant is False
    loaded.close()


def test_a_closed_model_is_lost_not_undefined(prepared):
    loaded = load(prepared)
    loaded.close()
    loaded.close()
    with pytest.raises(DeviceLost):
        loaded.forward([Segment(0, 0, [5], (0, 1))])


def test_devices_are_listed_and_an_unknown_one_is_refused(prepared):
    adapter, name = prepared.adapter, prepared.adapter.name
    assert DEVICES[name] in [device.name for device in adapter.devices()]
    with pytest.raises(Unsupported, match="NOPE"):
        adapter.load(prepared.path, LoadOptions(device="NOPE"), silent)


def test_a_damaged_source_is_refused_by_name(prepared, tmp_path):
    name = prepared.adapter.name
    source = tmp_path / "damaged.gguf"
    source.write_bytes(b"fault=nothing-like-that" if name == "simulated" else b"GGUF" + b"\x03\0\0\0" * 20)
    target = tmp_path / "out"
    target.mkdir()
    with pytest.raises(ModelRefused, match=r"damaged\.gguf|nothing-like-that"):
        prepared.adapter.prepare(source, target, silent)
