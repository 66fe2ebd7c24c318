"""A model that its device has no room for: few of its layers are measured and scaled, and tell of shards alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_profiles.measured import MeasuredModel
from device_profiles.profile import Exactness
from device_profiles.store import ProfileStore
from device_profiles.workload import DecoderShape
from orchestrator.config.load import load_config
from orchestrator.planning.models import PlannedModel
from orchestrator.planning.profiling.work import Work, list_work, profile_store
from orchestrator.planning.stored import load_measured_hardware
from orchestrator.protocol.commands import Stop
from orchestrator.protocol.events import Failed, MeasuredValue
from orchestrator.worker.measuring.few_layers import RangeTimes, choose_ranges
from orchestrator.worker.measuring.measuring_worker import build_measuring_engine

MIB = 1 << 20
SCRIPT = "base_ms=0.5&row_ms=0.02"
TOY = DecoderShape.dense(12, 8, 1, 1, 8, 8, 272)
ms = st.floats(0.001, 1000.0)
counts = st.integers(2, 6)


@given(start=st.floats(0.0, 5.0), layer=ms, head=st.floats(0.0, 1000.0), middle=counts, more=st.integers(0, 120))
def test_a_model_is_found_again_in_what_its_ranges_take(
    start: float, layer: float, head: float, middle: int, more: int
) -> None:
    layers = middle + 2 + more
    times = RangeTimes(start + layer, start + middle * layer, start + layer + head, 0.0)
    assert times.find_start_ms(middle) == pytest.approx(start, abs=1e-6 * (start + middle * layer))
    assert times.scale_ms(start, middle, layers) == pytest.approx(layers * layer + head, rel=1e-6)


@given(first=ms, middle_ms=ms, last=ms, start=st.floats(0.0, 10.0), middle=counts, layers=st.integers(8, 120))
def test_whatever_disturbs_more_layers_take_no_less(
    first: float, middle_ms: float, last: float, start: float, middle: int, layers: int
) -> None:
    times = RangeTimes(first, middle_ms, last, 0.0)
    some, more = (times.scale_ms(start, middle, count) for count in (layers, layers + 1))
    assert 0.0 <= some <= more
    assert some >= max(0.0, first + middle_ms + last - 3 * start) * (1 - 1e-9)


@given(layers=st.integers(4, 200), held=st.integers(4, 300), uncached=st.integers(0, 300))
def test_ranges_are_apart_and_no_more_than_there_is_room_for(layers: int, held: int, uncached: int) -> None:
    first, middle, last = choose_ranges(layers, held, uncached)
    assert (first.first, last.end) == (0, layers)
    assert first.end <= middle.first < middle.end <= last.first
    count = sum(part.end - part.first for part in (first, middle, last))
    assert 4 <= count <= min(held, layers, max(8, uncached + 2))
    assert count == min(held, layers) or middle.end - middle.first >= uncached, "they do not stay in a cache"


def write_config(directory: Path, layers: int, more: str = "") -> Path:
    path = directory / "cluster.yaml"
    path.write_text(
        f"model: {{source: 'simulated:toy?{SCRIPT}&layers={layers}', adapter: simulated, device: auto}}\n"
        f"drafts: []\nlimits: {{kv_cache: 16 MiB, max_running: 4}}\nstore: {{directory: '{directory}/store'}}\n{more}"
    )
    return path


def measure(work: Work, store: ProfileStore, **job: Any) -> list[Any]:
    """Do a piece of work as its worker does, and keep what it finds; returns its events."""
    options = {**work.spec(store, refresh=False, steps_s=0.3).options, "keep": True, **job}
    engine, events = build_measuring_engine(options), list[Any]()
    engine.submit(Stop())
    engine.run(events.append)
    return events


def find_work(
    directory: Path, layers: int, monkeypatch: pytest.MonkeyPatch, more: str = ""
) -> tuple[Work, ProfileStore]:
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "2")
    config = load_config(write_config(directory, layers, more))
    return list_work(config, directory, ["simulated:SIM"])[0], profile_store(config)


def find_models(events: list[Any]) -> list[MeasuredModel]:
    return [
        msgspec.convert(event.value, MeasuredModel)
        for event in events
        if isinstance(event, MeasuredValue) and event.kind == "model"
    ]


def test_few_layers_cost_what_all_cost_and_are_never_taken_for_them(tmp_path, monkeypatch) -> None:
    work, store = find_work(tmp_path, 12, monkeypatch)
    assert work.job.may_cut
    few = find_models(measure(work, store, room_bytes=3 * MIB))[0]
    assert (few.few_layers, few.layers, few.planned_bytes > 3 * MIB) == (8, 12, True)
    assert few.cost.ms(4) == pytest.approx(0.5 + 4 * 0.02, rel=0.02), "by what the device itself says that it took"
    (kind,) = load_measured_hardware(store)
    (option,) = kind.options(PlannedModel("simulated-toy", TOY, digest=work.digest), [], Exactness.BIT, 0)
    assert (option.source, option.runs_whole) == ("few layers", False)
    short = replace(work, job=msgspec.structs.replace(work.job, room_bytes=3 * MIB))
    assert short.is_known(store), "where there is no room for all, nothing is missing"
    assert work.find_model_profile(store) is None, "where there is, the whole is still to be measured"
    store.save(replace(few, formats=few.formats.removesuffix(" few_layers"), few_layers=0, layer_parts={}))
    newest = short.find_model_profile(store)
    assert newest is not None
    assert not newest.few_layers, "what the whole was seen to take goes before"
    (kind,) = load_measured_hardware(store)
    (option,) = kind.options(PlannedModel("simulated-toy", TOY, digest=work.digest), [], Exactness.BIT, 0)
    assert option.runs_whole


@pytest.mark.parametrize(
    ("layers", "more", "reason"),
    [
        (3, "", "it has 3 layers, too few to measure some of them"),
        (12, "placement: {sharding: never}", ""),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_sum_or_measured_whole(
    tmp_path, monkeypatch, layers, more, reason
) -> None:
    work, store = find_work(tmp_path, layers, monkeypatch, more)
    if not reason:
        assert not work.job.may_cut
        return
    failed = measure(work, store, room_bytes=MIB)[-1]
    assert isinstance(failed, Failed)
    assert reason in failed.message
    assert "takes 4.0 MiB, and 1.0 MiB may be filled" in failed.message
    assert not store.models()
