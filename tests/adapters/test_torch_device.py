"""torch's own: every family against transformers' own attention, the same weights in both, failures, CUDA's paths."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adapters import registry
from adapters.contract import (
    AdapterUnavailable,
    DeviceLost,
    LoadOptions,
    ModelRefused,
    OutOfMemory,
    Precision,
    RuntimeFailed,
    Segment,
    Unsupported,
    silent,
)
from adapters.decoder.from_gguf import GgufWeights
from adapters.decoder.spec import Grouped
from adapters.hardware import processor
from adapters.hf_directory import open_weights
from adapters.source_meter import SourceMeter
from adapters.torch_device.failures import classify_torch_failure
from adapters.torch_device.plan import shapes_for
from adapters.torch_device.products import EightBitLinear, FourBitLinear, PackedLinear, PlainLinear, TiledLinear, packs
from adapters.torch_device.quantize import QuantizedTorchWeights
from adapters.torch_device.weights import Affine, read_decoder, read_prepared_tensors, write_weights
from device_profiles.profile import Exactness
from tests.adapters.test_hf_reference import TOKENS, VARIANTS
from tests.support import reference_decoder, tiny_models
from tests.support.model_rows import loads_models

ADAPTER = registry.get("torch_device")
OPTIONS = LoadOptions(slots=4, kv_cache_bytes=8 << 20, activations=Precision.FP32)
METER = SourceMeter(Path(__file__), lambda done, total: None)


def prepare_variant(root: Path, variant: str) -> tuple[Path, Path]:
    """A tiny model's directory, and what the adapter made of it."""
    name, changes = VARIANTS[variant]
    source = tiny_models.write_model(root / "model", name, **changes)
    target = root / "prepared"
    target.mkdir()
    ADAPTER.prepare(source, target, silent)
    return source, target


@loads_models("torch_device", "safetensors", tiny_models.ARCHITECTURES, tiny_models.write_model)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_family_computes_what_the_reference_computes(tmp_path, variant):
    source, target = prepare_variant(tmp_path, variant)
    model = ADAPTER.load(target, OPTIONS, silent)
    assert model.capabilities.weights == "fp32"
    model.forward([Segment(2, 0, TOKENS[:50], (0, 0))])
    rows = model.forward([Segment(2, 50, TOKENS[50:], (0, len(TOKENS) - 50))]).logits
    expected = reference_decoder.logits(open_weights(source), TOKENS)[50:]
    assert np.abs(rows - expected).max() < 2e-4
    model.close()


def test_bfloat16_is_the_models_own_within_its_rounding(tmp_path):
    if Precision.BF16 not in ADAPTER.devices()[0].precisions:
        pytest.skip("torch does not compute in bf16 natively on this processor")
    source, target = prepare_variant(tmp_path, "llama")
    model = ADAPTER.load(target, LoadOptions(slots=4, kv_cache_bytes=8 << 20, activations=Precision.BF16), silent)
    assert model.capabilities.activations is model.capabilities.kv_cache is Precision.BF16
    assert model.capabilities.weights == "fp32, held in bf16"
    rows = model.forward([Segment(0, 0, TOKENS, (0, len(TOKENS)))]).logits
    expected = np.asarray(reference_decoder.logits(open_weights(source), TOKENS))
    assert np.abs(rows - expected).mean() < 0.05 * expected.std()  # weights this sharp amplify any rounding
    model.close()


def test_a_shape_that_the_class_of_the_family_has_no_words_for_is_refused(tmp_path):
    directory = tiny_models.write_model(tmp_path / "model", "llama", num_attention_heads=5, num_key_value_heads=5)
    target = tmp_path / "prepared"
    target.mkdir()
    ADAPTER.prepare(directory, target, silent)
    with pytest.raises(ModelRefused, match=r"a llama of this shape .* not a multiple of .* heads .*another runtime"):
        ADAPTER.load(target, OPTIONS, silent)


@pytest.mark.model
def test_the_files_hold_what_the_source_holds_to_the_bit(tmp_path, default_model_path):
    """Quantised groups stay groups: values, zeros and scales."""
    weights = GgufWeights(default_model_path)
    write_weights(weights, tmp_path, METER)
    spec = read_decoder(tmp_path)
    assert spec == weights.spec
    tensors = dict(read_prepared_tensors(tmp_path, spec, spec.all_layers))
    for name in ("embedding", "final_norm", "0.query", "7.down", "29.mlp_norm"):
        expected = weights.tensor(name)
        assert type(tensors[name]) is type(expected)
        for part in ("values", "scales", "zeros") if isinstance(expected, Grouped) else ("values",):
            assert np.array_equal(getattr(tensors[name], part), getattr(expected, part))


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
def test_what_torchao_made_is_kept_to_the_bit_and_is_near_the_weights(tmp_path, precision):
    weights = open_weights(tiny_models.write_model(tmp_path / "model", "llama"))
    quantised = QuantizedTorchWeights(weights, precision)
    write_weights(quantised, tmp_path, METER)
    tensors = dict(read_prepared_tensors(tmp_path, (spec := read_decoder(tmp_path)), spec.all_layers))
    for name, most_steps in (("embedding", 0.51), ("head", 0.51), ("0.down", 0.51), ("3.query", 0.51)):
        kept, made = tensors[name], quantised.tensor(name)
        assert isinstance(kept, Affine)
        assert isinstance(made, Affine)
        narrow = precision is Precision.INT4 and "." in name
        assert kept.values.max() <= (15 if narrow else 127)
        assert np.array_equal(kept.values, made.values)
        assert np.array_equal(kept.scales, made.scales)
        assert (kept.offsets is not None) == narrow
        exact = weights.tensor(name).float32()
        steps = np.repeat(kept.scales, exact.shape[1] // kept.scales.shape[1], axis=1)
        assert (np.abs(kept.float32() - exact) <= most_steps * steps + 0.004 * np.abs(exact).max()).all()
    assert np.array_equal(tensors["final_norm"].float32(), weights.tensor("final_norm").float32())


def test_weights_that_torch_does_not_hold_are_refused_and_torchao_is_named(tmp_path, monkeypatch):
    source, _ = prepare_variant(tmp_path, "llama")
    with pytest.raises(Unsupported, match="int8, int4 or"):
        ADAPTER.prepare(source, tmp_path, silent, Precision.FP16)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(AdapterUnavailable, match=r"torchao.* outrider extras install torch quantize"):
        ADAPTER.prepare(source, tmp_path, silent, Precision.INT8)


def test_quantised_weights_are_held_as_they_are_in_bfloat16_and_said_to_be_widened_in_float32(tmp_path):
    source, _ = prepare_variant(tmp_path, "llama")
    target = tmp_path / "int8"
    target.mkdir()
    ADAPTER.prepare(source, target, silent, Precision.INT8)
    native = ADAPTER.devices()[0].precisions[0] is Precision.BF16
    for activations, kind in ((Precision.BF16, EightBitLinear), (Precision.FP32, PackedLinear)):
        if activations is Precision.BF16 and not native:
            continue
        model: Any = ADAPTER.load(target, dataclasses.replace(OPTIONS, activations=activations), silent)
        made = [type(part) for part in model._runner.network.modules() if "Linear" in type(part).__name__]
        assert made == [kind] * (7 * 4 + 1)
        widened = ", held in fp32" if activations is Precision.FP32 else ""
        assert model.capabilities.weights == f"int8 (from fp32){widened}"
        model.close()


@pytest.mark.parametrize("damage", ["decoder.json", "layer-00002.safetensors", "rest.safetensors"])
def test_damaged_files_are_refused_by_name(tmp_path, damage):
    _, target = prepare_variant(tmp_path, "llama")
    (target / damage).write_bytes(b"{")
    with pytest.raises(ModelRefused, match=damage):
        ADAPTER.load(target, OPTIONS, silent)


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_library_is_answered_with_the_install_command(tmp_path, monkeypatch, missing):
    _, target = prepare_variant(tmp_path, "llama")  # needs neither
    monkeypatch.setitem(sys.modules, missing, None)
    for call in (ADAPTER.devices, functools.partial(ADAPTER.load, target, OPTIONS, silent)):
        with pytest.raises(AdapterUnavailable, match=rf"{missing} is not installed: outrider extras install torch"):
            call()


def test_a_library_that_does_not_go_with_another_is_told_in_its_own_words(tmp_path, monkeypatch):
    """Versions that do not fit are no missing torch: the owner has to know which."""
    words = "huggingface-hub>=1.5.0,<2.0 is required, but found huggingface-hub==2.4.0"
    (tmp_path / "transformers.py").write_text(f"raise ImportError({words!r})")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    with pytest.raises(AdapterUnavailable, match=rf"here: {re.escape(words)}: outrider extras install torch"):
        ADAPTER.devices()


def test_a_device_that_is_not_there_is_refused_and_those_there_are_named(tmp_path):
    _, target = prepare_variant(tmp_path, "llama")
    with pytest.raises(Unsupported, match=r"no device 'CUDA:9' here; there is CPU"):
        ADAPTER.load(target, LoadOptions(device="CUDA:9"), silent)
    with pytest.raises(Unsupported, match="fp16"):
        ADAPTER.load(target, LoadOptions(activations=Precision.FP16), silent)


def test_a_pool_that_memory_does_not_hold_is_out_of_memory(tmp_path):
    _, target = prepare_variant(tmp_path, "llama")
    with pytest.raises(OutOfMemory, match="torch ran out of memory"):
        ADAPTER.load(target, LoadOptions(kv_cache_bytes=1 << 60), silent)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), OutOfMemory),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), OutOfMemory),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), OutOfMemory),
        (MemoryError(), OutOfMemory),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), DeviceLost),
        (RuntimeError("could not execute a primitive"), RuntimeFailed),
    ],
)
def test_failures_have_types(error, kind):
    assert type(classify_torch_failure(error)) is kind


def test_an_unknown_token_is_refused_before_it_reaches_the_device(tmp_path):
    _, target = prepare_variant(tmp_path, "llama")
    model = ADAPTER.load(target, OPTIONS, silent)
    with pytest.raises(Unsupported, match="outside the vocabulary"):
        model.forward([Segment(0, 0, [1, 320], (0, 1))])
    model.forward([Segment(0, 0, [1, 319], (0, 1))])
    model.close()
    with pytest.raises(DeviceLost):
        model.forward([Segment(0, 2, [1], (0, 1))])


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
    ids=["nothing", "spins", "policy"],
)
def test_the_environment_is_left_alone_where_the_operator_has_spoken(monkeypatch, given, expected):
    """And what is set is set before torch is imported, which reads it."""
    monkeypatch.setattr(os, "environ", given.copy())
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(AdapterUnavailable, match="torch is not installed"):
        ADAPTER.devices()
    assert os.environ.get("GOMP_SPINCOUNT") == expected


def test_a_product_in_tiles_is_the_product():
    weight, bias, rows = torch.randn(24, 16), torch.randn(24), torch.randn(1, 192, 16)
    expected = torch.nn.functional.linear(rows, weight, bias)
    product = PlainLinear(weight, bias)
    for tile in (64, 192):
        assert torch.allclose(TiledLinear(product, tile)(rows), expected, atol=1e-5)


def test_with_a_fixed_width_every_product_and_every_attention_tile_has_one_shape(tmp_path):
    _, target = prepare_variant(tmp_path, "llama")
    model: Any = ADAPTER.load(
        target, dataclasses.replace(OPTIONS, numerical_class=ADAPTER.classes(OPTIONS)[-1][0]), silent
    )
    seen: list[int] = []
    products = [part.product for part in model._runner.network.modules() if isinstance(part, TiledLinear)]
    assert len(products) == 7 * 4 + 1
    for product in products:
        product.register_forward_pre_hook(lambda _, rows: seen.append(rows[0].shape[1]))
    for slot, count in enumerate((1, 16, 17, 70)):
        model.forward([Segment(slot, 0, TOKENS[:count], (0, count))])
    assert set(seen) == {16}
    model.close()


@pytest.mark.parametrize(("heads_per_key", "tile"), [(1, 16), (3, 16), (4, 8), (7, 8), (8, 4), (64, 1)])
def test_a_fixed_attention_tile_stays_below_what_amx_takes_another_kernel_for(heads_per_key, tile):
    shapes = shapes_for("cpu", Exactness.BIT, 16, heads_per_key)
    assert (shapes.rows, shapes.least_rows, shapes.product_tile) == (16, 16, 16)
    assert shapes.tile == shapes.most_tile == tile


def make_packed(dtype: Any) -> tuple[PackedLinear, Any]:
    """Return a product, and 96 rows for it."""
    if not packs(dtype):
        pytest.skip(f"oneDNN packs no {dtype} on this processor")
    return PackedLinear(torch.randn(64, 1536).to(dtype), None), torch.randn(96, 1536).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_packed_product_are_the_same_for_any_number_of_rows_and_threads(dtype):
    if dtype is torch.bfloat16 and "amx_bf16" in processor().isa:
        pytest.skip("with AMX a product in bfloat16 depends on its rows, so it runs in tiles: see the next test")
    check_rows(*make_packed(dtype), (2, 3, 5, 6, 16, 48))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_packed_product_in_tiles_are_the_same_for_any_number_of_tiles_and_threads(dtype):
    product, rows = make_packed(dtype)
    tiled = TiledLinear(product, 16)
    check_rows(lambda part: tiled(part[None])[0], rows, (16, 32, 48, 96))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 1536), (576, 576), (16, 32)])
def test_rows_of_a_product_over_quantised_weights_are_the_same_for_any_number_of_rows_and_threads(
    bits, outputs, inputs
):
    generator = np.random.default_rng(1)
    if bits == 8:
        values = generator.integers(-127, 128, (outputs, inputs), np.int8)
        weight = Affine(values, generator.random((outputs, 1), np.float32), None)
    else:
        values4 = generator.integers(0, 16, (outputs, inputs), np.uint8)
        scales, offsets = generator.random((2, outputs, inputs // 32), np.float32)
        weight = Affine(values4, scales, offsets)
    parts = [torch.from_numpy(part) for part in (weight.values, weight.scales, weight.offsets) if part is not None]
    bias = torch.randn(outputs).bfloat16()
    make: Any = EightBitLinear if bits == 8 else FourBitLinear
    product = make(*parts, bias)
    rows = torch.randn(96, inputs).bfloat16()
    expected = rows.float() @ torch.from_numpy(weight.float32()).T + bias.float()
    assert (product(rows).float() - expected).abs().mean() < 0.01 * expected.std()
    check_rows(product, rows, (1, 2, 3, 5, 6, 16, 48))


def check_rows(product: Any, rows: Any, widths: tuple[int, ...]) -> None:
    """So many rows at a time have the bits of all together."""
    threads = torch.get_num_threads()
    expected = product(rows)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        for width in widths:
            product_rows = torch.cat([product(part.contiguous()) for part in rows[: 96 // width * width].split(width)])
            assert torch.equal(product_rows, expected[: len(product_rows)]), (count, width)
    torch.set_num_threads(threads)
