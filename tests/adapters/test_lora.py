"""LoRA adapters on llama.cpp and torch: what they compute, that nobody else is touched, and which files are refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters import registry
from adapters.brief_invariance import find_brief_variance
from adapters.contract import LoadOptions, ModelRefused, Precision, Segment, Unsupported, silent
from adapters.invariance import each_lora, fingerprint_bits, run_probe
from adapters.lora import check_lora, find_lora, open_lora
from tests.support.tiny_gguf import Tiny, logits, write
from tests.support.tiny_lora import draw_pairs, merge, write_lora, write_peft

LLAMA_CPP, TORCH = "llama_cpp", "torch_device"
TINY = Tiny("llama", hidden=128, heads=2, kv_heads=1, head_dim=64, vocabulary=256)
TOKENS = [(5 * i * i + 3 * i + 1) % TINY.vocabulary for i in range(100)]
BLOCK = 32


def load(directory: Path, loras: dict[str, Path], runtime: str = LLAMA_CPP) -> Any:
    prepared, adapter = directory / f"prepared-{runtime}", registry.get(runtime)
    source = directory / "tiny.gguf"
    if not prepared.exists():
        prepared.mkdir()
        adapter.prepare(source, prepared, silent)
    opened = tuple(open_lora(name, str(path), directory, source, runtime, directory) for name, path in loras.items())
    activations = Precision.FP32 if runtime == TORCH else None
    options = LoadOptions(slots=4, kv_cache_bytes=8 << 20, threads=1, activations=activations, loras=opened)
    return adapter.load(prepared, options, silent)


def run(model: Any, slot: int, lora: str, tokens: list[int] = TOKENS) -> np.ndarray:
    model.release(slot)
    model.use_lora(slot, lora)
    return model.forward([Segment(slot, 0, tokens, (0, len(tokens)))]).logits.copy()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("runtime", "form"), [(LLAMA_CPP, "gguf"), (LLAMA_CPP, "peft"), (TORCH, "peft")])
def test_an_adapter_computes_what_weights_with_it_would(tmp_path, family, runtime, form):
    tiny = replace(TINY, family=family, qk_norm=family == "qwen3")
    arrays = write(tmp_path / "tiny.gguf", tiny)
    pairs = draw_pairs(arrays)
    path = write_lora(tmp_path / "own.gguf", pairs, family) if form == "gguf" else None
    model = load(tmp_path, {"own": path or write_peft(tmp_path / "own", tiny, pairs)}, runtime)
    plain, expected = logits(tiny, arrays, TOKENS), logits(tiny, merge(arrays, pairs), TOKENS)
    assert np.abs(plain - expected).max() > 0.5 * np.abs(plain).max()
    for lora, wanted in (("", plain), ("own", expected), ("", plain)):
        assert np.abs(run(model, 1, lora) - wanted).max() <= 0.01 * np.abs(wanted).max()
    model.close()


@pytest.fixture(params=[LLAMA_CPP, TORCH])
def two(tmp_path, request):
    arrays = write(tmp_path / "tiny.gguf", TINY)
    loras = {name: write_peft(tmp_path / name, TINY, draw_pairs(arrays, seed)) for seed, name in enumerate("ab")}
    model = load(tmp_path, loras, request.param)
    yield model
    model.close()


def test_sequences_of_several_adapters_in_one_forward_have_the_bits_that_each_has_alone(two):
    alone = {lora: run(two, 0, lora) for lora in ("", "a", "b")}
    for slot, lora in enumerate(alone):
        two.release(slot)
        two.use_lora(slot, lora)
    for start in range(0, len(TOKENS), 5):
        part = [Segment(slot, start, TOKENS[start : start + 5], (0, 5)) for slot in range(3)]
        rows = two.forward(part).logits
        for slot, logits_alone in enumerate(alone.values()):
            assert np.array_equal(rows[5 * slot : 5 * slot + 5], logits_alone[start : start + 5])


def test_a_prefix_is_found_by_the_slots_of_its_adapter_alone_and_a_fork_keeps_it(two):
    alone = {lora: run(two, 3, lora) for lora in ("", "a", "b")}
    two.release(3)
    for slot, lora in enumerate(("", "a")):
        run(two, slot, lora)
        two.share(slot, TOKENS[: 2 * BLOCK])
    two.use_lora(2, "b")
    assert two.attach(2, TOKENS) == 0
    for again, lora in ((0, ""), (1, "a")):
        two.release(again)  # what it leaves behind is remembered
        two.use_lora(2, lora)
        held = two.attach(2, TOKENS)
        assert held == 2 * BLOCK
        rows = two.forward([Segment(2, held, TOKENS[held:], (0, len(TOKENS) - held))]).logits
        assert np.array_equal(rows, alone[lora][held:])
        two.use_lora(3, "b")  # a fork has its source's, whatever its slot had
        two.fork(3, 2, 80, 80)
        rows = two.forward([Segment(3, 80, TOKENS[80:], (0, 20))]).logits
        assert np.array_equal(rows, alone[lora][80:])
        with pytest.raises(Unsupported, match="an adapter is chosen for a free one"):
            two.use_lora(2, "b")
        two.release(2)
        two.release(3)
    with pytest.raises(Unsupported, match="no adapter 'c'; there is a, b"):
        two.use_lora(0, "c")


def test_each_adapter_is_checked_and_its_bits_are_in_the_fingerprint(two, tmp_path, request):
    seen = []
    for lora in each_lora(two):
        probe = run_probe(two)
        assert find_brief_variance(two, probe) == ""
        seen.append((lora, probe.fingerprint))
    assert [lora for lora, _ in seen] == ["", "a", "b"]
    assert len({fingerprint for _, fingerprint in seen}) == 3
    both = fingerprint_bits(two)
    assert both.split("+")[0] == run_probe(two).fingerprint
    assert np.array_equal(run(two, 0, ""), run(two, 1, ""))
    runtime = request.node.callspec.params["two"]
    one = load(tmp_path, {"a": tmp_path / "b", "b": tmp_path / "a"}, runtime)
    assert fingerprint_bits(one) != both
    one.close()


CONFIG: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "biases": {"bias": "all"},
    "rank": {"r": 8},
    "kind": {"peft_type": "IA3"},
}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("family", "it is an adapter of qwen2, and tiny.gguf is llama"),
        ("model", "it is a model, and no LoRA adapter"),
        ("shape", r"blk.0.attn_q.weight: it is for 128 x 64 values, and tiny.gguf has 128 x 128"),
        ("tensor", "it changes blk.7.attn_q.weight, and tiny.gguf has no such matrix"),
        ("half", r"blk.0.attn_q.weight has no pair of matrices"),
        ("ranks", "its matrices have the ranks 3 and 4"),
        ("nothing", "there is no adapter at"),
        ("dora", "use_dora is set"),
        ("biases", "it changes biases"),
        ("rank", "has the rank 4, and r is 8"),
        ("kind", "peft_type is not LORA"),
    ],
)
def test_a_wrong_adapter_is_refused_by_what_its_head_says(tmp_path, wrong, why):
    arrays = write(tmp_path / "tiny.gguf", TINY)
    pairs = draw_pairs(arrays)
    narrow, wide = pairs["blk.0.attn_q.weight"]
    path = tmp_path / "own.gguf"
    write_named = partial(write_lora, path)
    if wrong in CONFIG:
        path = write_peft(tmp_path / "peft", TINY, pairs, CONFIG[wrong])
    elif wrong == "family":
        write_named(pairs, "qwen2")
    elif wrong == "model":
        path = tmp_path / "tiny.gguf"
    elif wrong == "shape":
        write_named({"blk.0.attn_q.weight": (narrow[:, :64], wide)})
    elif wrong == "tensor":
        write_named({"blk.7.attn_q.weight": (narrow, wide)})
    elif wrong == "half":
        write_named({"blk.0.attn_q.weight": (narrow, wide[:, 0])})
    elif wrong == "ranks":
        write_named({"blk.0.attn_q.weight": (narrow[:3], wide)})
    with pytest.raises(ModelRefused, match=why):
        check_lora(find_lora(str(path), tmp_path), tmp_path / "tiny.gguf")
