"""Prompts that OpenVINO reads and rows that llama.cpp decodes: what both make of one model, and of its KV cache."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from adapters import registry
from adapters.contract import CapacityError, ModelRefused, Precision, Segment, Unsupported, silent
from adapters.device_check import check_device
from adapters.model_checks import check_files
from adapters.model_source import ModelSource, resolve
from adapters.model_store import ModelStore
from adapters.names import OPENVINO_LLAMA
from adapters.openvino_llama.adapter import OpenVinoLlamaAdapter
from orchestrator.fitting.precision import sizes_of
from tests.support.conformance import NO_FORK
from tests.support.model_rows import loads_models
from tests.support.prepared_models import load_small, prepare_beside
from tests.support.tiny_gguf import Tiny, logits, write, write_file
from tests.support.tiny_llama_files import write_llama_file

pytestmark = NO_FORK
tiny = partial(Tiny, hidden=128, heads=4, kv_heads=2, head_dim=32)
ADAPTER = OpenVinoLlamaAdapter()
MODELS = {
    "llama": tiny("llama"),
    "llama-q4": tiny("llama", kind=Kind.Q4_0),
    "qwen2": tiny("qwen2", bias=True, kind=Kind.Q8_0),
    "qwen3": tiny("qwen3", qk_norm=True, tied=True),
}
_PROMPT, _TEXT = 30, 40


prepare, load = partial(prepare_beside, ADAPTER), partial(load_small, ADAPTER)


def text_of(shape: Tiny, count: int, step: int = 5) -> list[int]:
    return [(step * i * i + 3 * i + 1) % shape.vocabulary for i in range(count)]


@loads_models(
    OPENVINO_LLAMA, "GGUF", {name: shape.family for name, shape in MODELS.items()}, partial(write_file, MODELS)
)
@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_rows_behind_a_prompt_are_what_the_reference_computes(tmp_path, shape):
    """The prompt is read in two pieces, and rows behind it attend to what was copied."""
    arrays = write(tmp_path / "tiny.gguf", shape)
    model = load(prepare(tmp_path / "tiny.gguf"))
    tokens = text_of(shape, _TEXT)
    expected = logits(shape, arrays, tokens)
    model.forward([Segment(1, 0, tokens[:17], (0, 0))])
    read = model.forward([Segment(1, 17, tokens[17:_PROMPT], (0, _PROMPT - 17))]).logits.copy()
    decoded = model.forward([Segment(1, _PROMPT, tokens[_PROMPT:], (0, _TEXT - _PROMPT), apart=True)]).logits
    tolerance = 0.05  # activations are quantised to 8 bits
    assert np.abs(read - expected[17:_PROMPT]).max() <= tolerance * np.abs(expected).max()
    assert np.abs(decoded - expected[_PROMPT:]).max() <= tolerance * np.abs(expected).max()
    assert model.capabilities.weights.startswith(f"{shape.kind.name}, prompts ")
    model.close()


def test_it_is_known_how_much_of_both_caches_was_ever_used(tmp_path):
    shape = tiny("llama", context=1024)
    write(tmp_path / "tiny.gguf", shape)
    model = load(prepare(tmp_path / "tiny.gguf"))
    total, tokens = model.capabilities.total_blocks, text_of(shape, 320)
    unused = model.count_touched_blocks()
    model.forward([Segment(0, 0, tokens, (0, 0))])
    read = model.count_touched_blocks()
    model.forward([Segment(0, 320, tokens, (0, 0), apart=True)])
    assert 0 <= unused < read < model.count_touched_blocks() <= total
    model.release(0)
    assert read < model.count_touched_blocks(), "what was written stays in memory"
    model.close()


def test_a_prefix_that_the_reader_let_go_of_is_given_back_to_it_to_the_bit(tmp_path):
    shape = tiny("llama", context=1024)
    write(tmp_path / "tiny.gguf", shape)
    model = load(prepare(tmp_path / "tiny.gguf"))
    tokens = text_of(shape, 200)
    whole = model.forward([Segment(0, 0, tokens, (150, 200))]).logits.copy()
    model.share(0, tokens)
    model.release(0)
    held = model.attach(1, tokens)
    assert held == 192
    assert model.forward([Segment(1, held, tokens[held:], (0, 8))]).logits.tobytes() == whole[-8:].tobytes()
    model.close()


def test_prompts_for_which_the_reader_has_no_room_at_once_are_read_in_turns(tmp_path):
    """Sequences that decode have left the reader, and of prompts that are read side by side the last ones wait."""
    shape = tiny("llama", context=256)
    write(tmp_path / "tiny.gguf", shape)
    prepared = prepare(tmp_path / "tiny.gguf")
    texts = [text_of(shape, 200, step) for step in (5, 7, 11)]
    wide = load(prepared)
    expected = [wide.forward([Segment(0, 0, text, (199, 200))]).logits.copy() for text in texts]
    position_bytes = wide.spec.bytes_per_token
    wide.close()
    model = load(prepared, kv_cache_bytes=position_bytes * 3 * 512)  # room for two prompts there, all of them here
    for slot, text in enumerate(texts):
        model.forward([Segment(slot, 0, text[:100], (0, 0))])
    rest = [Segment(slot, 100, text[100:], (99, 100)) for slot, text in enumerate(texts)]
    assert model.forward(rest).logits.tobytes() == np.concatenate(expected).tobytes()
    decoding = [Segment(slot, 200, [7], (0, 1), apart=True) for slot in range(3)]
    together = model.forward([*decoding, Segment(3, 0, texts[0][:50], (0, 0))]).logits.copy()
    alone = [model.forward([part]).logits.copy() for part in decoding]
    assert together.tobytes() == np.concatenate(alone).tobytes()
    model.close()


def test_what_has_no_room_changes_nothing(tmp_path):
    shape = tiny("llama", context=256)
    write(tmp_path / "tiny.gguf", shape)
    model = load(prepare(tmp_path / "tiny.gguf"), kv_cache_bytes=1)
    free = model.free_blocks()
    with pytest.raises(CapacityError):
        model.forward([Segment(0, 0, text_of(shape, 100), (0, 0))])
    assert (model.free_blocks(), model.count_cached_positions(0)) == (free, 0)
    model.close()


def test_a_conversion_that_is_there_is_linked_and_not_made_again(tmp_path):
    source = write_file(MODELS, tmp_path, "qwen2")
    store = ModelStore(tmp_path / "store")
    file = ModelSource(source, str(source), str(source))
    alone = store.prepare(file, registry.get("openvino_rt"), silent)
    both = store.prepare(file, ADAPTER, silent)
    assert os.path.samefile(alone / "model.bin", both / "model.bin")
    label = json.loads((alone / "spec.json").read_text())["weights"]
    for path in store.root.glob("*/openvino_rt-*/*"):
        path.unlink()
    again = store.prepare(file, registry.get("openvino_rt"), silent)
    assert os.path.samefile(again / "model.bin", both / "model.bin")
    assert json.loads((again / "spec.json").read_text())["weights"] == label


def test_where_a_link_fails_the_model_is_converted_and_the_other_artefact_stays(tmp_path, monkeypatch):
    source = write_file(MODELS, tmp_path, "qwen2")
    store = ModelStore(tmp_path / "store")
    file = ModelSource(source, str(source), str(source))
    alone = store.prepare(file, registry.get("openvino_rt"), silent)
    before = {name: (alone / name).read_bytes() for name in ("model.xml", "model.bin")}
    link = os.link

    def fail_for_weights(made: Path, target: Path) -> None:
        if target.name == "model.bin":
            raise OSError("too many links")
        link(made, target)

    monkeypatch.setattr(os, "link", fail_for_weights)
    both = store.prepare(file, ADAPTER, silent)
    assert not any(os.path.samefile(alone / name, both / name) for name in before)
    assert {name: (alone / name).read_bytes() for name in before} == before
    load(both).close()


def test_what_a_call_left_that_was_ended_is_gone_on_with(tmp_path):
    source = write_file(MODELS, tmp_path, "qwen2")
    prepared = prepare(source)
    facts = (prepared / "spec.json").read_bytes()
    (prepared / "spec.json").unlink()
    ADAPTER.prepare(source, prepared, silent)
    assert (prepared / "spec.json").read_bytes() == facts
    load(prepared).close()


def test_its_weights_are_counted_as_those_of_both_runtimes(tmp_path):
    file = resolve(str(write_file(MODELS, tmp_path, "llama-q4")), tmp_path)
    alone, both = sizes_of(file), sizes_of(file, ADAPTER)
    assert both.held_bytes == alone.held_bytes + file.weights_bytes
    assert both.draft_bytes == alone.held_bytes + alone.draft_bytes


def test_what_only_one_of_the_two_runs_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(ModelRefused, match="set adapter: llama_cpp"):
        check_files(write_llama_file(tmp_path, "qwen35"), adapter=OPENVINO_LLAMA)


def test_other_devices_and_weights_are_refused_with_the_way_out():
    with pytest.raises(Unsupported, match="adapter: llama_cpp"):
        check_device(OPENVINO_LLAMA, "GPU")
    with pytest.raises(Unsupported, match="leave weights at auto"):
        ADAPTER.recipe(Precision.INT8)
