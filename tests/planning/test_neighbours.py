"""Plans of several targets: a later one sees what the earlier ones take, and none takes what another has."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from orchestrator.config.load import load_config
from orchestrator.config.model import ClusterConfig
from orchestrator.daemon.bootstrap.plan_board import PlanBoard
from orchestrator.daemon.bootstrap.planning import PlanMaking, make_plan
from orchestrator.daemon.control.loops.planner_port import StartPlan
from orchestrator.planning.wanted import PlanError
from policies.planning.plan import Plan
from tests.support.profiles import store_simulated_profiles


@pytest.fixture(autouse=True)
def devices(monkeypatch):
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "2")


SECOND = "models:\n  - {source: 'simulated:toy?shift=1', adapter: %s, device: %s, name: other, drafts: []}\n"


def write(
    directory: Path, *, adapter: str = "auto", device: str = "auto", extra: str = ""
) -> tuple[Path, ClusterConfig]:
    path = directory / "cluster.yaml"
    path.write_text(
        "model: {source: 'simulated:toy?', adapter: auto, device: auto, name: toy}\ndrafts: []\n"
        f"{SECOND % (adapter, device)}store: {{directory: '{directory}/store'}}\n"
        f"state: {{directory: '{directory}/state'}}\n{extra}"
    )
    return path, load_config(path)


LARGE = (
    "placement: {keep_free: 0.0, concurrency: 1024, prompt_tokens: 1024, output_tokens: 512}\n"
    "limits: {max_running: 1024}\n"
)
"""A load whose KV cache takes all of a simulated device."""


def store(directory: Path, row_ms: dict[str, float]) -> None:
    for name, script in (("toy", ""), ("other", "shift=1")):
        store_simulated_profiles(directory / "store" / "profiles", row_ms, name, script=script)


def plan_all(directory: Path, config: ClusterConfig) -> tuple[PlanBoard, list[StartPlan]]:
    """Plan what is left to plans, one target after the other."""
    board = PlanBoard(config.targets, directory)
    plans: list[StartPlan] = []
    for number, target in enumerate(config.targets):
        if target.planned:
            found = make_plan(target, directory, directory / "state", None, board.list_taken(number))
            board.note(number, partial(plan_of, found))
            plans.append(found)
    return board, plans


def plan_of(found: StartPlan) -> Plan:
    return found.proposal.plan


def device_of(found: StartPlan) -> str:
    return found.proposal.plan.replicas[0].shards[0].device


def test_the_second_goes_where_the_first_is_not_unless_that_is_twice_as_slow(tmp_path):
    _, config = write(tmp_path)
    store(tmp_path, {"SIM": 2.0, "SIM.1": 3.0})
    _, plans = plan_all(tmp_path, config)
    assert [device_of(one) for one in plans] == ["here/SIM", "here/SIM.1"]
    store(tmp_path, {"SIM": 2.0, "SIM.1": 9.0})
    _, plans = plan_all(tmp_path, config)
    assert [device_of(one) for one in plans] == ["here/SIM", "here/SIM"]
    assert any("toy on here/SIM" in line and "1/2 of its time" in line for line in plans[1].proposal.assumed)
    alone, beside = (one.proposal.plan.goodput_tokens_per_s for one in plans)
    assert beside == pytest.approx(alone / 2, rel=0.1)


def test_what_no_plan_places_is_left_out_of_the_first_plan_too(tmp_path):
    _, config = write(tmp_path, adapter="simulated", device="SIM")
    store(tmp_path, {"SIM": 2.0, "SIM.1": 3.0})
    _, plans = plan_all(tmp_path, config)
    assert device_of(plans[0]) == "here/SIM.1"


def test_memory_that_the_first_has_is_not_there_for_the_second(tmp_path):
    _, config = write(tmp_path, extra=LARGE)
    store(tmp_path, {"SIM": 2.0, "SIM.1": 30.0})
    _, plans = plan_all(tmp_path, config)
    assert [device_of(one) for one in plans] == ["here/SIM", "here/SIM.1"], "both do not fit on one"


def test_where_nothing_is_left_there_is_no_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "1")
    _, config = write(tmp_path, extra=LARGE)
    store(tmp_path, {"SIM": 2.0})
    with pytest.raises(PlanError):
        plan_all(tmp_path, config)


def test_a_plan_that_is_made_again_leaves_the_others_their_memory(tmp_path):
    _, config = write(tmp_path, extra=LARGE)
    store(tmp_path, {"SIM": 2.0, "SIM.1": 3.0})
    board, plans = plan_all(tmp_path, config)
    assert [device_of(one) for one in plans] == ["here/SIM", "here/SIM.1"]
    making = PlanMaking(config.targets[0], tmp_path, lambda: board.list_taken(0))
    refused = {"here/SIM": (0.0, "it fails")}
    with pytest.raises(PlanError):
        making.again(plans[0].proposal, {}, plans[0].targets, refused, {})
    alone = PlanMaking(config.targets[0], tmp_path)
    assert device_of(alone.again(plans[0].proposal, {}, plans[0].targets, refused, {})) == "here/SIM.1"


def test_the_command_shows_each_plan_or_the_one_that_is_named(tmp_path, outrider):
    path, _ = write(tmp_path)
    store(tmp_path, {"SIM": 2.0, "SIM.1": 3.0})
    shown = outrider("plan", "--config", path).stdout
    assert "model toy" in shown
    assert "model other" in shown
    told = json.loads(outrider("plan", "--json", "--config", path).stdout)
    devices = [one["plan"]["replicas"][0]["shards"][0]["device"] for one in (told, *told["models"])]
    assert devices == ["here/SIM", "here/SIM.1"]
    other = json.loads(outrider("plan", "--json", "--model", "other", "--config", path).stdout)
    assert other["plan"] == told["models"][0]["plan"]
    missing = outrider("plan", "--model", "third", "--config", path)
    assert missing.returncode == 1
    assert "there is no model 'third' in this configuration; there is 'toy' and 'other'" in missing.stderr
