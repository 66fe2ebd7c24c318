"""torchao's products over quantised weights, as CUDA devices get them; on the CPU where a configuration runs there."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchao.quantization as torchao
from torchao.quantization.quant_primitives import (
    MappingType,
    _choose_qparams_affine_tinygemm,
    _quantize_affine_tinygemm,
)

from adapters import registry
from adapters.contract import AdapterUnavailable, LoadOptions, Precision, Segment, Unsupported, silent
from adapters.decoder.spec import Dense
from adapters.hf_directory import open_weights
from adapters.torch_device.adapter import TorchAdapter
from adapters.torch_device.products import Products
from adapters.torch_device.quantize import QuantizedTorchWeights
from adapters.torch_device.torchao_linear import choose_config, make_torchao_linear
from adapters.torch_device.weights import Affine, Float8Rows, Quantised, read_decoder, read_prepared_tensors
from device_profiles.profile import DeviceProfile
from policies.models.quantization import ModelSizes, NoPrecision, PrecisionRequest, choose_precision
from tests.support import tiny_models

OUTPUTS, INPUTS = 48, 96
HOPPER, ADA, AMPERE, TURING = (9, 0), (8, 9), (8, 6), (7, 5)


def quantise(precision: Precision, outputs: int = OUTPUTS, inputs: int = INPUTS) -> Quantised:
    """A matrix as `prepare` makes it."""
    matrix = np.random.default_rng(5).normal(0.0, 0.05, (outputs, inputs)).astype(np.float32)
    weights = SimpleNamespace(spec=None, tensor=lambda name: Dense(matrix))
    tensor = QuantizedTorchWeights(weights, precision).tensor("0.up")
    assert isinstance(tensor, (Affine, Float8Rows))
    near = {Precision.INT8: 0.01, Precision.FP8: 0.05, Precision.INT4: 0.12}[precision]
    assert np.abs(tensor.float32() - matrix).max() < near * np.abs(matrix).max()
    return tensor


@pytest.mark.parametrize("activations", [Precision.BF16, Precision.FP32])
@pytest.mark.parametrize("biased", [False, True])
def test_int8_keeps_its_values_to_the_bit_and_multiplies_by_them(activations, biased):
    weight = quantise(Precision.INT8)
    config = choose_config(weight, activations, TURING)
    assert isinstance(config, torchao.Int8WeightOnlyConfig)
    dtype = {Precision.BF16: torch.bfloat16, Precision.FP32: torch.float32}[activations]
    bias = torch.linspace(-1.0, 1.0, OUTPUTS).to(dtype) if biased else None
    linear = make_torchao_linear(weight, bias, config, torch.device("cpu"))
    assert isinstance(weight, Affine)
    assert np.array_equal(linear.weight.qdata.numpy(), weight.values)
    assert np.array_equal(linear.weight.scale.float().numpy(), weight.scales)
    rows = torch.randn(1, 7, INPUTS, generator=torch.Generator().manual_seed(1)).to(dtype)
    made = linear(rows)
    expected = rows.float() @ torch.from_numpy(weight.float32()).T + (0.0 if bias is None else bias.float())
    assert (made.dtype, made.shape) == (dtype, (1, 7, OUTPUTS))
    assert (made.float() - expected).abs().max() < (2e-2 if activations is Precision.BF16 else 1e-5)


def test_fp8_keeps_its_values_to_the_bit():
    """Its own configuration needs CUDA. The one for weights alone makes the same tensor, and runs here."""
    weight = quantise(Precision.FP8)
    assert isinstance(choose_config(weight, Precision.BF16, ADA), torchao.Float8DynamicActivationFloat8WeightConfig)
    config = torchao.Float8WeightOnlyConfig(granularity=torchao.PerRow())
    linear = make_torchao_linear(weight, None, config, torch.device("cpu"))
    assert isinstance(weight, Float8Rows)
    assert np.array_equal(linear.weight.qdata.view(torch.uint8).numpy(), weight.patterns)
    assert np.allclose(linear.weight.scale.float().numpy(), weight.scales, rtol=2**-8)
    rows = torch.randn(1, 7, INPUTS, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = rows.float() @ torch.from_numpy(weight.float32()).T
    assert (linear(rows).float() - expected).abs().max() < 2e-2


def test_the_patterns_of_fp8_are_torchs():
    patterns = np.arange(256, dtype=np.uint8)
    ours = Float8Rows(patterns[:, None], np.ones((256, 1), np.float32)).float32()[:, 0]
    assert np.array_equal(ours, torch.from_numpy(patterns).view(torch.float8_e4m3fn).float().numpy(), equal_nan=True)


def test_int4_goes_through_torchaos_own_quantisation_unchanged():
    """Its packing needs CUDA. What is packed is computed here as torchao computes it."""
    weight = quantise(Precision.INT4)
    assert isinstance(weight, Affine)
    config = choose_config(weight, Precision.BF16, AMPERE)
    assert isinstance(config, torchao.Int4WeightOnlyConfig)
    assert config.group_size == 32
    widened = torch.from_numpy(weight.float32()).bfloat16()
    scale, zero = _choose_qparams_affine_tinygemm(
        widened, MappingType.ASYMMETRIC, (1, 32), torch.int32, 0, 15,
        scale_dtype=torch.bfloat16, zero_point_dtype=torch.bfloat16,
    )  # fmt: skip
    values = _quantize_affine_tinygemm(widened, (1, 32), scale, zero, torch.int32, 0, 15)
    assert np.array_equal(values.numpy(), weight.values)
    assert np.allclose(scale.float().numpy().reshape(weight.scales.shape), weight.scales, rtol=0.01)


@pytest.mark.parametrize(
    ("precision", "activations", "capability", "outputs"),
    [
        (Precision.FP8, Precision.BF16, AMPERE, OUTPUTS),
        (Precision.FP8, Precision.FP16, HOPPER, OUTPUTS),
        (Precision.FP8, Precision.BF16, HOPPER, 50),  # no multiple of 16
        (Precision.INT4, Precision.FP16, HOPPER, OUTPUTS),
        (Precision.INT4, Precision.BF16, TURING, OUTPUTS),
    ],
)
def test_what_a_device_has_no_product_for_is_widened(precision, activations, capability, outputs):
    weight = quantise(precision, outputs)
    assert choose_config(weight, activations, capability) is None


def test_fp8_is_widened_on_a_processor():
    products = Products(torch.device("cpu"), Precision.FP32, 0)
    weight = quantise(Precision.FP8)
    linear = products.make(weight, None)
    rows = torch.randn(1, 3, INPUTS)
    assert torch.allclose(linear(rows), rows @ torch.from_numpy(weight.float32()).T, atol=1e-5)
    assert products.describe_storage("fp8 (from bf16)") == "fp8 (from bf16), held in fp32"


def test_fp8_is_prepared_read_back_and_computes_what_it_stands_for(tmp_path):
    adapter = TorchAdapter()
    source = tiny_models.write_model(tmp_path / "model", "llama")
    rows = []
    for weights in (None, Precision.FP8):
        target = tmp_path / f"prepared-{weights}"
        target.mkdir()
        adapter.prepare(source, target, silent, weights)
        options = LoadOptions(activations=Precision.FP32, slots=1, max_batch_rows=64, kv_cache_bytes=1 << 20)
        model = adapter.load(target, options, silent)
        rows.append(model.forward([Segment(0, 0, list(range(5, 45)), (0, 40))]).logits.copy())
        assert model.capabilities.weights == ("fp32" if weights is None else "fp8 (from fp32), held in fp32")
        model.close()
    assert np.corrcoef(rows[0].ravel(), rows[1].ravel())[0, 1] > 0.9  # three bits of a fraction, in a random model
    exact = open_weights(source)
    for name, kept in read_prepared_tensors(target, (read := read_decoder(target)), read.all_layers):
        values = exact.tensor(name).float32()
        if values.ndim > 1:
            assert isinstance(kept, Float8Rows)
            smallest = kept.scales * 2**-9
            assert (np.abs(kept.float32() - values) <= np.abs(values) / 12 + smallest).all()


def test_a_missing_torchao_is_named(monkeypatch):
    weight = quantise(Precision.INT8)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(AdapterUnavailable, match=r"torchao.* outrider extras install torch quantize"):
        choose_config(weight, Precision.BF16, HOPPER)


def cuda_device(major: int, minor: int, hip: str | None = None) -> DeviceProfile:
    facts = SimpleNamespace(major=major, minor=minor, name="a GPU", total_memory=8 << 30)
    cuda = SimpleNamespace(get_device_properties=lambda index: facts)
    fake = SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=hip))
    return TorchAdapter()._cuda(fake, 0)


MODEL = ModelSizes(parameters=1_000_000, file_bytes=2_000_000, stored="bf16")


def test_a_cuda_device_offers_what_its_capability_has():
    int8_and_4 = (Precision.INT8, Precision.INT4)
    assert cuda_device(8, 6).weights == int8_and_4
    assert cuda_device(8, 9).weights == (Precision.FP8, *int8_and_4)
    assert cuda_device(9, 0).weights == (Precision.FP8, *int8_and_4)
    assert cuda_device(9, 0, hip="6.2").weights == ()
    for weights in ("int8", "int4"):
        assert choose_precision(cuda_device(7, 5), MODEL, wanted=PrecisionRequest(weights)).weights == weights
    assert choose_precision(cuda_device(9, 0), MODEL, wanted=PrecisionRequest("fp8")).weights == "fp8"
    with pytest.raises(
        NoPrecision, match="weights fp8: torch_device has none for CUDA:0; there are as_file, fast, int8"
    ):
        choose_precision(cuda_device(8, 6), MODEL, wanted=PrecisionRequest("fp8"))


def test_a_cuda_device_keeps_the_files_values_while_they_fit():
    assert choose_precision(cuda_device(9, 0), MODEL).weights == "as_file"
    assert choose_precision(cuda_device(9, 0), MODEL, free_bytes=1_100_000).weights == "fp8"
    assert choose_precision(cuda_device(8, 0), MODEL, free_bytes=1_150_000).weights == "int8"
    assert choose_precision(cuda_device(9, 0), MODEL, free_bytes=700_000).weights == "int4"


@pytest.mark.parametrize("name", ["openvino_rt", "onnx_rt"])
def test_other_runtimes_refuse_fp8(name, tmp_path):
    with pytest.raises(Unsupported, match="fp8"):
        registry.get(name).prepare(tmp_path, tmp_path, silent, Precision.FP8)
