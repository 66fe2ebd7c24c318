"""What was measured is kept readably, and found again only where it still holds."""

import dataclasses
import json

import pytest

from device_profiles.acceptance import DepthYield, PairAcceptance, TargetTexts
from device_profiles.cost import StepCost, estimate_round_tokens
from device_profiles.curve_fit import StepSample
from device_profiles.link import LinkProfile
from device_profiles.measured import (
    DeviceRates,
    Energy,
    Hardware,
    MatmulRate,
    MeasuredDevice,
    MeasuredModel,
    RoundOverhead,
    fingerprint,
)
from device_profiles.profile import Precision
from device_profiles.roofline import roofline
from device_profiles.store import SCHEMA, ProfileStore

HARDWARE = Hardware("cpu", "some processor", 24 << 30, numa_nodes=1, physical_cores=2, isa=("avx2", "avx512f"))
DEVICE = MeasuredDevice(
    "0123456789ab",
    "openvino_rt",
    "GPU.0",
    "openvino 2026.4.1",
    HARDWARE,
    threads=2,
    rates=DeviceRates((MatmulRate(Precision.FP32, 185e9), MatmulRate(Precision.BF16, 395e9)), 51e9),
    energy=Energy(reason="no counters"),
)
COST = StepCost((1.0, 2.0), (7.5, 8.0), 0.5, error=0.02, serial=True, prefill=StepCost((8.0,), (9.0,)))
MODEL = MeasuredModel(
    *("0123456789ab", "openvino_rt", "GPU.0", "target", "some/model name", "feed", "int4 (Q4_1)", "bf16", "bf16"),
    *("bit", "auto auto auto", 2),
    cost=COST,
    decode_error=0.02,
    prefill_error=0.03,
    worst_error=0.1,
    overhead=RoundOverhead(0.1, 0.02, 0.03),
    load_s=1.5,
    row_invariant=True,
    paid_rows=2,
    layers=30,
    kv_bytes_per_token=1024,
    planned_parts={"weights": 5},
    samples=(StepSample((1, 1), (16, 2048), 9.5),),
)
YIELD = DepthYield(2, (0.8, 0.5), (0.6, 0.3), 100)
PAIR = PairAcceptance("t", "feed", "suffix", "chat", "policy", 1, (YIELD, DepthYield(4, (0.8,), (0.6,), 90)), 0.1)
TEXTS = TargetTexts("t", "feed", "chat", ((1, 2), (3,)), ((4,), ()))
LINK = LinkProfile("10.0.0.1", "10.0.0.2", 0.3, 1e9)


@pytest.fixture
def store(tmp_path):
    return ProfileStore(tmp_path / "profiles")


def test_everything_is_found_as_it_was_saved(store):
    for value in (DEVICE, MODEL, PAIR, TEXTS, LINK):
        store.save(value)
    assert store.devices() == [DEVICE]
    assert store.models() == store.models("0123456789ab") == [MODEL]
    assert (store.pairs(), store.texts(), store.links()) == ([PAIR], [TEXTS], [LINK])
    assert store.models("other") == []


def test_files_are_readable_and_a_new_one_replaces_the_old(store):
    path = store.save(MODEL)
    assert store.save(dataclasses.replace(MODEL, load_s=2.0)) == path
    assert [model.load_s for model in store.models()] == [2.0]
    text = path.read_text(encoding="utf-8")
    assert json.loads(text)["cost"]["row_ms"] == [7.5, 8.0]
    assert '"row_knots": [ 1.0, 2.0 ]' in text, "a list of numbers is a line"
    assert list(path.parent.iterdir()) == [path], "no draft is left"


def test_other_fields_of_the_key_are_other_files(store):
    store.save(MODEL)
    store.save(dataclasses.replace(MODEL, threads=1))
    store.save(dataclasses.replace(MODEL, fingerprint="ba9876543210"))
    assert len(store.models()) == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "\x00",
        json.dumps({"schema": SCHEMA}),
        json.dumps({**dataclasses.asdict(DEVICE), "schema": SCHEMA - 1}),
        json.dumps({**dataclasses.asdict(DEVICE), "schema": SCHEMA, "new": 1}),
        json.dumps({**dataclasses.asdict(DEVICE), "schema": SCHEMA, "threads": "two"}),
        json.dumps({**dataclasses.asdict(DEVICE), "schema": SCHEMA, "hardware": 5}),
    ],
)
def test_a_file_that_cannot_be_used_counts_as_not_there(store, text):
    path = store.save(DEVICE)
    path.write_text(text, encoding="utf-8")
    assert store.devices() == []
    store.save(DEVICE)
    assert store.devices() == [DEVICE]


def test_a_cost_that_makes_no_sense_counts_as_not_there(store):
    path = store.save(MODEL)
    data = json.loads(path.read_text(encoding="utf-8"))
    data["cost"]["row_knots"] = [2.0, 1.0]
    path.write_text(json.dumps(data), encoding="utf-8")
    assert store.models() == []


def test_the_fingerprint_follows_hardware_driver_and_runtime():
    mark = fingerprint(HARDWARE, "openvino 2026.4.1")
    assert mark == fingerprint(
        dataclasses.replace(HARDWARE, memory_bytes=HARDWARE.memory_bytes - 4096), "openvino 2026.4.1"
    )
    others = {
        fingerprint(HARDWARE, "openvino 2026.5"),
        *(
            fingerprint(dataclasses.replace(HARDWARE, **change), "openvino 2026.4.1")
            for change in (
                {"driver": "570.1"},
                {"name": "another"},
                {"isa": ("avx2",)},
                {"physical_cores": 4},
                {"memory_bytes": 48 << 30},
            )
        ),
    }
    assert len(others | {mark}) == 7


def test_only_what_was_seen_is_marked_as_drifted(store):
    store.save(MODEL)
    assert store.mark_drifted(MODEL, "rounds took twice as long")
    assert store.models() == [dataclasses.replace(MODEL, drifted="rounds took twice as long")]
    anew = dataclasses.replace(MODEL, measured_at="2027-01-01")
    store.save(anew)
    assert not store.mark_drifted(MODEL, "rounds took twice as long"), "it was measured anew meanwhile"
    assert store.models() == [anew]


def test_a_yield_is_what_its_positions_say():
    assert YIELD.tokens == pytest.approx(1.9)
    assert estimate_round_tokens(YIELD.conditional, 2) == pytest.approx(YIELD.tokens)
    assert PAIR.at(1) is YIELD
    assert PAIR.at(3) is YIELD
    assert PAIR.at(99).depth == 4


def test_the_roofline_turns_where_memory_and_arithmetic_take_the_same():
    known = {"read_bytes": 100e6, "matrix_elements": 135e6, "flops": 395e9, "bandwidth_bytes_per_s": 51e9}
    rates = roofline(**known)
    assert rates.bound == "memory"
    assert rates.turns_at_rows == pytest.approx((100e6 / 51e9) / (2 * 135e6 / 395e9))
    assert rates.turns_at_depth == 2
    assert roofline(**{**known, "flops": 1e9}).bound == "compute"
    with pytest.raises(ValueError, match="positive"):
        roofline(**{**known, "flops": 0.0})
