"""Shipped descriptions of devices: strict, each figure with its source; and what is estimated from them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_profiles.datasheet import EFFICIENCY, compute_precision, derive_cost
from device_profiles.known_devices import LIBRARY, DatasheetError, load_datasheet, load_known_devices
from device_profiles.profile import Precision
from device_profiles.workload import DecoderShape

EIGHT_BILLION = DecoderShape.dense(32, 4096, 32, 8, 128, 14336, 128_256)
GOOD = """
name: some-gpu
full_name: Some GPU
kind: gpu
runtimes: [torch_device]
sources:
  sheet: {title: Its datasheet, url: "https://example.org/sheet"}
memory_gb: {value: 24, source: sheet}
matmul_tflops:
  bf16: {value: 121, source: sheet, how: half of what it says}
"""


@pytest.mark.parametrize("name", [path.stem for path in sorted(LIBRARY.glob("*.yaml"))])
def test_every_shipped_description_loads_and_every_figure_has_a_source(name):
    sheet = load_known_devices()[name]
    assert sheet.figures()
    for key, figure in sheet.figures().items():
        assert figure.source.title, key
        assert figure.source.url.startswith("https://"), key
    assert sheet.bandwidth_bytes_per_s > 0
    assert compute_precision(sheet) is not None
    assert (sheet.memory_gb is not None) == (sheet.kind == "gpu"), "CPUs and NPUs use the host's memory"


def test_the_library_has_every_kind_and_rates_ascend_with_fewer_bits():
    kinds = [sheet.kind for sheet in load_known_devices().values()]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"gpu": 15, "cpu": 8, "npu": 5}
    for sheet in load_known_devices().values():
        order = (Precision.FP32, Precision.FP16, Precision.INT8, Precision.INT4)
        rates = [sheet.flops(precision) for precision in order if sheet.flops(precision)]
        assert rates == sorted(rates), sheet.name


def test_the_descriptions_are_installed_with_the_package():
    patterns = (LIBRARY.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'device_profiles = ["library/*.yaml"' in patterns


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("memory_gb", "memory", "unknown field `memory`"),
        ("value: 24, source: sheet", "value: 24", r"missing required field `source` - at `\$.memory_gb`"),
        ("value: 24, source: sheet", "value: 24, source: other", "memory_gb: there is no source 'other'"),
        ("value: 24", "value: -1", "Expected `float` > 0.0"),
        ("value: 24", 'value: "24"', "Expected `float`, got `str`"),
        ("bf16:", "bf17:", "Invalid enum value 'bf17'"),
        ("kind: gpu", "kind: tpu", "Invalid enum value 'tpu'"),
        ("https://", "http://", "Expected `str` matching regex"),
        ("name: some-gpu", "name: other-gpu", "name is 'other-gpu', and must be the file's"),
        ("name: some-gpu", "name: [", "."),
    ],
)
def test_a_description_that_is_not_right_is_refused_by_name(tmp_path, old, new, says):
    path = tmp_path / "some-gpu.yaml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(DatasheetError, match=says) as refused:
        load_datasheet(path)
    assert str(path) in str(refused.value)


def test_a_source_that_nothing_uses_is_refused(tmp_path):
    path = tmp_path / "some-gpu.yaml"
    path.write_text(GOOD.replace("sources:\n", 'sources:\n  spare: {title: x, url: "https://x"}\n'))
    with pytest.raises(DatasheetError, match="nothing uses spare"):
        load_datasheet(path)


def test_a_good_description_says_how_a_figure_came_about(tmp_path):
    path = tmp_path / "some-gpu.yaml"
    path.write_text(GOOD)
    sheet = load_datasheet(path)
    assert sheet.flops(Precision.BF16) == 121e12
    assert sheet.matmul_tflops[Precision.BF16].how == "half of what it says"
    assert sheet.flops(Precision.INT8) == 0


shapes = st.builds(
    DecoderShape.dense,
    layers=st.integers(1, 100),
    hidden=st.sampled_from([64, 576, 4096, 8192]),
    heads=st.integers(1, 64),
    kv_heads=st.integers(1, 8),
    head_dim=st.sampled_from([32, 64, 128]),
    mlp=st.sampled_from([128, 1536, 14336]),
    vocabulary=st.integers(256, 260_000),
    tied_embeddings=st.booleans(),
)


def cost_on(shape, bandwidth, flops, bits=16.0):
    return derive_cost(
        shape,
        weight_bits=bits,
        kv_bytes=2.0,
        bandwidth_bytes_per_s=bandwidth,
        flops=flops,
        efficiency=EFFICIENCY["gpu"],
    )


@given(shapes, st.floats(1e10, 1e13), st.floats(1e11, 1e15), st.integers(1, 512), st.integers(0, 8192))
def test_more_rows_or_a_slower_device_never_cost_less(shape, bandwidth, flops, rows, context):
    now = cost_on(shape, bandwidth, flops).ms(rows, 1, context)
    assert cost_on(shape, bandwidth, flops).ms(rows + 1, 1, context) >= now * (1 - 1e-9)
    assert cost_on(shape, bandwidth / 2, flops).ms(rows, 1, context) >= now * (1 - 1e-9)
    assert cost_on(shape, bandwidth, flops / 2).ms(rows, 1, context) >= now * (1 - 1e-9)


@given(shapes, st.floats(1e10, 1e13), st.floats(1e11, 1e15))
def test_below_the_knee_bandwidth_decides_and_beyond_it_the_rate(shape, bandwidth, flops):
    efficiency = EFFICIENCY["gpu"]
    overhead = efficiency.layer_ms * shape.layers
    read_ms = shape.read_elements * 2 / (efficiency.bandwidth * bandwidth) * 1e3
    row_ms = shape.flops_per_row / (efficiency.compute * flops) * 1e3
    cost = cost_on(shape, bandwidth, flops)
    knee = read_ms / row_ms
    for rows in (1.0, knee / 2, knee * 2, knee * 10):
        if rows >= 1.0:
            assert cost.ms(rows) == pytest.approx(overhead + max(read_ms, rows * row_ms), rel=1e-6)


def test_a_known_model_on_known_devices_comes_out_where_the_roofline_puts_it():
    sheet = load_known_devices()["nvidia-h100-sxm"]
    cost = cost_on(EIGHT_BILLION, sheet.bandwidth_bytes_per_s, sheet.flops(Precision.BF16))
    assert EIGHT_BILLION.elements == pytest.approx(8.03e9, rel=0.01)
    assert cost.ms(1) == pytest.approx(cost.ms(100)), "memory-bound far beyond any depth"
    assert 5 < cost.ms(1) < 9  # 16 GB at 80 % of 3.35 TB/s, and 32 layers to start
    assert cost.ms(1, 1, 8192) - cost.ms(1) == pytest.approx(8192 * 131_072 / (0.8 * 3.35e12) * 1e3, rel=0.05)
    assert cost.ms(8, 8, 1000) > cost.ms(8, 1, 1000), "each sequence's KV cache is read"


def test_figures_that_are_not_known_are_not_taken_for_nothing():
    with pytest.raises(ValueError, match="positive"):
        cost_on(EIGHT_BILLION, 0.0, 1e12)
