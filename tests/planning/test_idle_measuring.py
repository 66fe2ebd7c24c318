"""What a start has left is measured while nobody asks, by real workers, beside a target that is scripted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import cast

import pytest

from device_profiles.device_load import DeviceLoad
from orchestrator.config.load import load_config
from orchestrator.daemon.bootstrap.idle_profiles import IdleMeasuring
from orchestrator.daemon.bootstrap.planning import make_plan
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.loops.plan_keeper import PlanKeeper
from orchestrator.daemon.control.port import StateView
from orchestrator.planning.basis import basis
from orchestrator.planning.profiling.work import profile_store
from orchestrator.planning.proposal import PlanProposal

WITHIN_S = 240.0


@dataclass
class Target:
    """Has so many streams, beside other programs that take so much."""

    streams: int = 0
    others: float = 0.0

    def view(self) -> StateView:
        return StateView("ready", "", "", "local", None, None, streams=self.streams)

    def list_loads(self) -> dict[str, DeviceLoad]:
        return {"here/CPU": DeviceLoad(1.0, self.others)}


@dataclass
class Keeper:
    """Takes note of what is planned by."""

    first: PlanProposal
    to_measure: tuple[str, ...] = ()
    observed: list[PlanProposal] = field(default_factory=list)

    @property
    def asked_now(self) -> PlanProposal:
        return self.first

    def observe_profiles(self, first: PlanProposal) -> None:
        self.observed.append(first)


@pytest.mark.parametrize("way", ["streams", "others"])
async def test_what_is_in_the_way_ends_it_and_later_it_is_measured(tmp_path, monkeypatch, caplog, way):
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "1")
    caplog.set_level("INFO")
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "model: {source: 'simulated:toy?', adapter: auto, device: auto, name: toy}\ndrafts: []\n"
        f"store: {{directory: '{tmp_path}/store'}}\n"
    )
    config = load_config(path)
    first = make_plan(config, tmp_path, tmp_path / "state").proposal
    assert [one.source for one in basis(first)] == ["estimate"]
    target, keeper, store = Target(), Keeper(first), profile_store(config)
    scripted = (cast(TargetControl, target), cast(PlanKeeper, keeper))
    running = asyncio.create_task(IdleMeasuring(config, tmp_path, *scripted, idle_s=0.2).run())
    try:
        await until(lambda: bool(store.devices()), running)
        setattr(target, way, 1)
        await until(lambda: "is measured later" in caplog.text, running)
        assert keeper.to_measure == ("simulated SIM, target",)
        assert all(profile.forwards_only for profile in store.models()), "measuring was not done"
        setattr(target, way, 0)
        await until(lambda: bool(keeper.observed), running)
        assert [one.source for one in basis(keeper.observed[0])] == ["measured"]
    finally:
        running.cancel()
        await asyncio.wait([running])


async def until(met, running: asyncio.Task[None]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not met():
            assert not running.done() or met()
            await asyncio.sleep(0.05)
