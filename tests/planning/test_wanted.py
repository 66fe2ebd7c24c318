"""What was measured of drafts, as the planner takes it."""

import pytest

from device_profiles.acceptance import DepthYield, PairAcceptance
from device_profiles.workload import DecoderShape
from orchestrator.config.load import parse_config
from orchestrator.planning.models import PlannedModel
from orchestrator.planning.profiling.work import describe_drafts_elsewhere, list_work
from orchestrator.planning.proposal import propose_here
from orchestrator.planning.wanted import (
    SUFFIX,
    build_measured_drafter,
    build_measured_drafters,
    build_request_from_config,
)
from tests.support.profiles import store_simulated_profiles

POOR, GOOD = DepthYield(4, (0.4,), (0.1,), 90), DepthYield(12, (0.8, 0.4), (0.6, 0.3), 90, 0.5)


def pair(rule, sequences, adapter, found=GOOD):
    return PairAcceptance("t", "digest", "suffix", "chat", rule, sequences, (POOR, found), 0.1, adapter=adapter)


def test_each_runtime_has_its_own_figures_of_the_policy():
    pairs = [pair("fixed", 1, ""), pair("policy", 1, "a"), pair("policy", 4, "b", POOR), pair("policy", 1, "b", POOR)]
    first, other = build_measured_drafters(SUFFIX, "suffix", pairs, "t", 1, 12)
    assert (first.runtime, other.runtime) == ("a", "b")
    assert first.by_policy
    assert other.by_policy
    assert first.coverage == 0.8 > other.coverage == 0.4
    assert first.serves("a")
    assert not first.serves("b")
    assert SUFFIX.serves("b")


def test_where_no_policy_was_measured_one_drafter_serves_all():
    (found,) = build_measured_drafters(SUFFIX, "suffix", [pair("fixed", 1, "")], "t", 1, 12)
    assert (found.runtime, found.by_policy) == ("", False)
    assert build_measured_drafters(SUFFIX, "suffix", [], "t", 1, 12) == [SUFFIX]
    fixed = build_measured_drafter(
        SUFFIX, "suffix", [pair("policy", 1, "a"), pair("fixed", 1, "")], "t", 1, 4, rule="fixed", runtime="a"
    )
    assert not fixed.by_policy
    assert fixed.coverage == 0.4


def model(name, layers):
    return PlannedModel(name, DecoderShape.dense(layers, 64, 2, 2, 32, 128, 100), ("int8",))


SERVED = (
    "model: {{source: 'simulated:toy', adapter: simulated, device: auto{replicas}}}\n"
    "drafts: [{{method: suffix}}, {{method: model, endpoint: 'http://mac:8080'}}]\n{more}"
)


@pytest.mark.parametrize(("more", "told"), [("", True), ("speculation: {method: off}\n", False)])
def test_what_a_server_drafts_is_said_to_be_no_part_of_a_prediction(tmp_path, more, told):
    store = store_simulated_profiles(tmp_path, {"SIM": 2.0})
    config = parse_config(SERVED.format(replicas="", more=more), tmp_path / "cluster.yaml")[0]
    request = build_request_from_config(config, tmp_path)
    assumed = propose_here(request, store, {}).assumed
    line = "drafts of http://mac:8080: nothing is predicted of them, as nobody has measured that server"
    assert (line in assumed) == told


def test_the_drafts_of_single_replicas_are_measured_once_each_but_for_those_of_other_hosts(tmp_path):
    own = "{{drafts: [{{method: model, source: 'simulated:toy?agree={0}', adapter: simulated}}]{1}}}"
    places = [("0.5", ""), ("0.5", ""), ("0.6", ", host: 10.0.0.3"), ("0.7", ", host: here")]
    items = f"[{', '.join(own.format(*place) for place in places)}]"
    text = (
        f"model: {{source: 'simulated:toy', adapter: simulated, replicas: {items}}}\n"
        "cluster: {address: '10.0.0.1:6379'}\n"
        "drafts: [{method: model, source: 'simulated:toy?agree=0.7', adapter: simulated}]\n"
    )
    config = parse_config(text, tmp_path / "cluster.yaml")[0]
    drafts = [work.job for work in list_work(config, tmp_path) if work.job.role == "draft"]
    assert [(job.drafter, job.model.source) for job in drafts] == [
        ("model", "simulated:toy?agree=0.7"),
        ("replica-0-model", "simulated:toy?agree=0.5"),
    ]
    assert describe_drafts_elsewhere(config) == [
        "model.replicas[2].drafts: they are not measured here; measure them on 10.0.0.3"
    ]
