"""A draft's own copy of a model: 4 bits, an output layer of fewer tokens, and all rows of the embedding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from adapters.contract import Adapter, LoadedModel, LoadOptions, ModelRefused, Segment, silent
from adapters.decoder import draft_outputs
from adapters.decoder.draft_outputs import choose_outputs, count_draft_bytes
from adapters.decoder.source import open_source
from adapters.gguf_splits import read_model_header
from adapters.libllama import find_mainline
from adapters.llama_cpp.adapter import LlamaCppAdapter
from adapters.llama_cpp.library import load_library
from adapters.openvino_llama.adapter import OpenVinoLlamaAdapter
from adapters.openvino_rt.adapter import OpenVinoAdapter
from adapters.openvino_rt.convert import convert
from adapters.source_meter import SourceMeter
from device_profiles.profile import DRAFT, Exactness
from orchestrator.planning.models import model_at_hand
from tests.support import tiny_models
from tests.support.conformance import NO_FORK, NO_MAINLINE
from tests.support.tiny_gguf import Tiny, logits, write

OUTPUTS, CONTROL = 24, 3
TOKENS = [5, 60, 17, 63, 40, 2, 23, 24, 25, 50]
tiny = partial(Tiny, hidden=128, heads=2, kv_heads=1, head_dim=64)
MODELS = {
    "qwen2-q4": tiny("qwen2", bias=True, kind=Kind.Q4_0),
    "qwen2-q8": tiny("qwen2", bias=True, kind=Kind.Q8_0),
    "llama-tied": tiny("llama", tied=True, kind=Kind.Q4_0),
}
RUNTIMES: dict[str, Callable[[], Adapter]] = {
    "ik": LlamaCppAdapter,
    "mainline": lambda: LlamaCppAdapter(lambda: load_library(find_mainline("xllamacpp"))),
    "behind openvino": OpenVinoLlamaAdapter,
}
OPTIONS = LoadOptions(exactness=Exactness.KERNEL, slots=2, kv_cache_bytes=8 << 20, threads=1)


@pytest.fixture
def few_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_outputs, "MOST_OUTPUTS", OUTPUTS)


def write_tiny(directory: Path, shape: Tiny) -> tuple[Path, dict[str, np.ndarray]]:
    """Its last token is a control token."""
    kinds = [1] * (shape.vocabulary - 1) + [CONTROL]
    return directory / "tiny.gguf", write(directory / "tiny.gguf", shape, {"tokenizer.ggml.token_type": kinds})


def load(adapter: Adapter, source: Path) -> LoadedModel:
    target = source.parent / "prepared"
    target.mkdir()
    adapter.prepare(source, target, silent, DRAFT)
    source.unlink()  # the copy needs nothing of it
    return adapter.load(target, OPTIONS, silent)


@pytest.mark.usefixtures("few_outputs")
@pytest.mark.parametrize(
    "runtime",
    [
        pytest.param("ik", marks=NO_FORK),
        pytest.param("mainline", marks=NO_MAINLINE),
        pytest.param("behind openvino", marks=NO_FORK),
    ],
)
@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_a_copy_says_some_tokens_and_reads_all(tmp_path: Path, shape: Tiny, runtime: str) -> None:
    """Tokens outside its outputs are fed, one alone among them."""
    source, arrays = write_tiny(tmp_path, shape)
    model = load(RUNTIMES[runtime](), source)
    model.forward([Segment(0, 0, TOKENS[:6], (0, 0))])
    model.forward([Segment(0, 6, [9], (0, 1))])  # which the next one takes back
    rows = model.forward([Segment(0, 6, TOKENS[6:9], (0, 3))]).logits.copy()
    last = Segment(0, 9, TOKENS[9:], (0, 1), apart=model.capabilities.apart_tokens > 0)
    rows = np.concatenate([rows, model.forward([last]).logits])
    spec, weights = model.spec, model.capabilities.weights
    model.close()
    expected = logits(shape, arrays, TOKENS)[6:][:, spec.output_ids]
    error = 0.05 if shape.kind is Kind.Q4_0 else 0.6  # 4 bits of random values are a tenth off, in each layer
    assert spec.output_ids == (*range(OUTPUTS), 63)
    assert (spec.vocabulary_size, spec.outputs) == (64, OUTPUTS + 1)
    assert np.abs(rows - expected).max() < error * np.abs(expected).max()
    label = f"int4 (Q4_0{'' if shape.kind is Kind.Q4_0 else ' from Q8_0'}), 25 of 64 tokens"
    assert weights.partition(", prompts ")[0] == label


@pytest.mark.usefixtures("few_outputs")
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0, Kind.F32], ids=lambda kind: kind.name)
def test_openvino_has_four_bits_and_all_outputs(tmp_path: Path, kind: Kind) -> None:
    shape = tiny("qwen2", bias=True, kind=kind)
    source, arrays = write_tiny(tmp_path, shape)
    target = tmp_path / "prepared"
    target.mkdir()
    convert(source, target, SourceMeter(source, lambda done, total: None), DRAFT)  # in this process
    model = OpenVinoAdapter().load(target, OPTIONS, silent)
    rows = model.forward([Segment(0, 0, TOKENS, (6, 10))]).logits.copy()
    spec, weights = model.spec, model.capabilities.weights
    model.close()
    expected = logits(shape, arrays, TOKENS)[6:]
    error = 0.05 if kind is Kind.Q4_0 else 0.6
    assert (spec.output_ids, spec.outputs) == ((), 64)
    assert weights == f"int4 (Q4_0{'' if kind is Kind.Q4_0 else f' from {kind.name}'})"
    assert np.abs(rows - expected).max() < error * np.abs(expected).max()


def test_a_small_vocabulary_stays_whole(tmp_path: Path) -> None:
    source, _ = write_tiny(tmp_path, MODELS["qwen2-q8"])
    header = read_model_header(source)
    assert choose_outputs(header) == ()
    whole = sum(tensor.size for tensor in header.tensors)
    assert 0.5 * whole < count_draft_bytes(header) < 0.6 * whole
    model = load(LlamaCppAdapter(), source)
    assert (model.spec.outputs, model.capabilities.weights) == (64, "int4 (Q4_0 from Q8_0)")
    model.close()


def test_a_plan_takes_a_draft_as_its_copy(tmp_path: Path) -> None:
    source, _ = write_tiny(tmp_path, MODELS["qwen2-q8"])
    whole, copy, own = (
        model_at_hand(str(source), "", Path(), weights, tmp_path / "store", adapter="llama_cpp", drafts=drafts)
        for weights, drafts in (("auto", False), ("auto", True), ("as_file", True))
    )
    assert (whole.formats("cpu"), copy.formats("cpu"), own.formats("cpu")) == (("as_file",), ("draft",), ("as_file",))
    assert copy.bits("draft") < 0.6 * whole.bits("as_file")
    assert own.file_bits == whole.file_bits


def test_directories_have_no_such_copy(tmp_path: Path) -> None:
    directory = tiny_models.write_model(tmp_path / "whole", "llama")
    with pytest.raises(ModelRefused, match="made of GGUF files alone"):
        open_source(directory, DRAFT)
