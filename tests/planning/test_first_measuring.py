"""What is said of measuring before and while it goes on, and what is planned before anything was measured."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.contract import silent
from device_profiles.measured import DeviceRates, Hardware, MatmulRate, MeasuredDevice
from device_profiles.profile import Exactness, Precision
from orchestrator.clock import SystemClock
from orchestrator.config.load import load_config
from orchestrator.config.placement import PlacementSection
from orchestrator.daemon.bootstrap.planning import make_plan
from orchestrator.daemon.bootstrap.start_profiles import StartWatch, list_wanted, profile_missing
from orchestrator.planning.basis import basis, list_doubts
from orchestrator.planning.estimates import EstimableDevice, estimate_option
from orchestrator.planning.lacking import leave_lacking
from orchestrator.planning.models import model_at_hand
from orchestrator.planning.profiling import progress as progress_module
from orchestrator.planning.profiling.duration import measure_pace, predict_duration_s
from orchestrator.planning.profiling.progress import MeasuringProgress
from orchestrator.planning.profiling.work import profile_store
from orchestrator.planning.promise import predict_promise
from orchestrator.planning.proposal import build_proposal, propose_here
from orchestrator.planning.wanted import PlanError, PlanRequest
from tests.support.profiles import store_simulated_profiles
from tests.support.simulated_time import SimulatedClock

TOY = Hardware("simulated", "simulated device SIM", 1 << 30)
OTHER = Hardware("simulated", "simulated device SIM.1", 1 << 30)
seconds = st.floats(0.5, 1e4)


@given(st.lists(seconds, min_size=1, max_size=6), seconds)
def test_the_time_is_told_beforehand_and_is_never_more_than_the_budget(each: list[float], budget_s: float) -> None:
    told: list[str] = []
    predicted_s = {f"part {number}": one for number, one in enumerate(each)}
    progress = MeasuringProgress(predicted_s, budget_s, lambda stage, fraction: told.append(stage), SimulatedClock())
    progress.tell_beforehand()
    assert f"takes about {min(sum(each), budget_s):.0f} s" in told[0]
    assert ("placement.profile_budget_s" in told[0]) == (sum(each) > budget_s)
    for number in range(len(each)):
        progress.begin(f"part {number}")
        assert told[-1].startswith(f"profile part {number} ({number + 1} of {len(each)}): ")
        progress.end(f"part {number}")


async def test_a_piece_is_told_again_with_what_it_took_and_may_take(monkeypatch) -> None:
    monkeypatch.setattr(progress_module, "TELL_EVERY_S", 0.001)
    told: asyncio.Queue[str] = asyncio.Queue()
    clock = SimulatedClock()
    progress = MeasuringProgress({"toy": 60.0}, 300.0, lambda stage, fraction: told.put_nowait(stage), clock)
    progress.begin("toy")
    assert await told.get() == "profile toy (1 of 1): start"
    telling = asyncio.create_task(progress.keep_telling())
    clock.now_s += 12.0
    assert await told.get() == "profile toy (1 of 1): start (12 s of about 60 s)"
    telling.cancel()


def write_config(directory: Path, source: str) -> Path:
    path = directory / "cluster.yaml"
    path.write_text(
        f"model: {{source: '{source}', adapter: auto, device: auto, name: toy}}\ndrafts: []\n"
        f"store: {{directory: '{directory}/store'}}\n"
    )
    return path


@given(pace=st.floats(0.5, 10.0))
@pytest.mark.parametrize("texts", [False, True])
def test_a_slower_machine_takes_longer_and_what_was_measured_takes_what_it_took(tmp_path_factory, texts, pace) -> None:
    directory = tmp_path_factory.mktemp("config")
    config = load_config(write_config(directory, "simulated:toy"))
    store = profile_store(config)
    one = list_wanted(config, directory)[0]
    assert predict_duration_s(one, store, pace, texts=texts) == pytest.approx(
        pace * predict_duration_s(one, store, 1.0, texts=texts)
    )
    assert predict_duration_s(one, store, pace, texts=True) < predict_duration_s(one, store, pace)


def test_the_pace_of_this_machine_is_a_number_to_multiply_with():
    assert 0.0 < measure_pace() < 200.0


def device(flops: float, bandwidth: float, adapter: str = "simulated") -> MeasuredDevice:
    rates = DeviceRates((MatmulRate(Precision.FP32, flops),) if flops else (), bandwidth)
    return MeasuredDevice("", adapter, "SIM", "1", TOY, 0, rates)


def ask(directory: Path, **placement: Any) -> PlanRequest:
    toy = model_at_hand("simulated:toy", "toy", directory, "auto", directory)
    return PlanRequest(toy, (), True, Exactness.BIT, 8, 1, PlacementSection(**placement))


@given(st.floats(1e9, 1e15), st.floats(1e9, 1e13))
def test_an_estimate_by_rates_is_surer_than_one_without(tmp_path_factory, flops: float, bandwidth: float) -> None:
    toy = model_at_hand("simulated:toy", "toy", Path(), "auto", tmp_path_factory.mktemp("store"))
    known, assumed = estimate_option(device(flops, bandwidth), toy), estimate_option(device(0.0, 0.0), toy)
    assert known.source == assumed.source == "estimate"
    assert 0.0 < known.cost.error < assumed.cost.error
    assert known.cost.ms(1) > 0.0
    assert estimate_option(device(2 * flops, 2 * bandwidth), toy).cost.ms(1) <= known.cost.ms(1)


def test_estimates_stand_only_where_nothing_was_measured(tmp_path):
    store = store_simulated_profiles(tmp_path / "other", {}, "toy")
    with pytest.raises(PlanError, match="no profile of toy"):
        propose_here(ask(tmp_path), store, {})
    found = propose_here(ask(tmp_path), store, {}, estimable=[EstimableDevice(device(0.0, 0.0))])
    assert [one.source for one in found.plan.shards] == ["estimate"]
    assert [one.source for one in basis(found)] == ["estimate"]
    assert "is planned by an estimate" in list_doubts(found)[0]
    measured = store_simulated_profiles(tmp_path / "measured", {"SIM": 500.0})
    found = propose_here(ask(tmp_path), measured, {}, estimable=[EstimableDevice(device(1e15, 1e13))])
    assert [one.source for one in found.plan.shards] == ["measured"]
    assert list_doubts(found) == ()


@pytest.mark.parametrize("only", [(), ("there",), ("simulated", "there")])
def test_estimates_leave_out_runtimes_that_do_not_run_the_model(tmp_path, only):
    store = store_simulated_profiles(tmp_path / "other", {}, "toy")
    asked = ask(tmp_path)
    asked = replace(asked, target=replace(asked.target, runtimes=only))
    devices = [EstimableDevice(one) for one in (device(1e15, 1e13), device(1e9, 1e9, "there"))]
    found = propose_here(asked, store, {}, estimable=devices)
    assert {one.runtime for one in found.plan.shards} == {"there" if only == ("there",) else "simulated"}
    with pytest.raises(PlanError, match="no profile of toy"):
        propose_here(replace(asked, target=replace(asked.target, runtimes=("none",))), store, {}, estimable=devices)


def test_an_estimate_takes_what_loads_at_once_and_converts_only_where_nothing_does(tmp_path):
    store = store_simulated_profiles(tmp_path / "other", {}, "toy")
    soon, later = (EstimableDevice(device(*rates)) for rates in ((1e9, 1e9, "soon"), (1e15, 1e13, "later")))
    later = replace(later, prepared=False)
    found = propose_here(ask(tmp_path), store, {}, estimable=[later, soon])
    assert [one.runtime for one in found.plan.shards] == ["soon"]
    assert "later: converts the model first, and is planned with once it is measured" in found.assumed
    (named,) = found.cluster.devices
    kept, behind, _ = leave_lacking(found.cluster, found.behind, {(named.id, "soon"): "it refuses the model"})
    again = build_proposal(kept, found.request, behind)
    assert [one.runtime for one in again.plan.shards] == ["later"]


@given(st.floats(1e9, 1e12), st.floats(1e9, 1e12), st.floats(0.25, 4.0))
def test_a_promise_is_worth_measuring_where_the_estimate_could_be_that_much_better(
    tmp_path_factory, flops: float, bandwidth: float, factor: float
) -> None:
    directory = tmp_path_factory.mktemp("promise")
    asked = ask(directory)
    known = estimate_option(device(flops, bandwidth), asked.target)
    store = store_simulated_profiles(directory, {"SIM": factor * known.cost.ms(2)}, hardware=TOY)
    planned = propose_here(asked, store, {})
    promise = predict_promise(planned, EstimableDevice(device(flops, bandwidth, "other"), prepared=False))
    assert promise.is_worth_measuring == (promise.most > 1.1 * promise.now)
    slower = predict_promise(planned, EstimableDevice(device(flops / 4, bandwidth / 4, "other")))
    assert slower.most <= promise.most
    assert promise.text.startswith("up to ")
    none = predict_promise(planned, EstimableDevice(replace(device(flops, bandwidth), hardware=OTHER)))
    assert not none.is_worth_measuring, "that device is not here"


async def test_a_target_is_planned_with_as_soon_as_its_forwards_are_known(tmp_path: Path, monkeypatch) -> None:
    """Its rounds take longer than its forwards, and what ends measuring must not throw these away."""
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "1")
    config = load_config(write_config(tmp_path, "simulated:toy?base_ms=4"))
    store, awaited = profile_store(config), asyncio.Event()
    awaited.set()
    await profile_missing(config, tmp_path, StartWatch(silent, awaited, SystemClock()), 3600.0)
    (kept,) = store.models()
    assert kept.forwards_only
    (work,) = list_wanted(config, tmp_path)
    assert not work.is_known(store)
    planned = make_plan(config, tmp_path, tmp_path / "state").proposal
    assert [one.source for one in basis(planned)] == ["measured"]
    assert any(line.startswith("branches of drafts: ") for line in basis(planned)[0].figures)
    assert "only its forwards were measured" in list_doubts(planned)[0]
    awaited.clear()
    await profile_missing(config, tmp_path, StartWatch(silent, awaited, SystemClock()), 3600.0)
    assert work.is_known(store)
    assert store.texts()
