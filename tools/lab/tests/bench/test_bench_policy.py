"""`outrider bench policy`, as a person runs it, over a simulated device; and what it records and replays."""

from __future__ import annotations

import json

import pytest
from outrider_lab.bench.policy.arms import PLAIN, Timed, policy_of
from outrider_lab.bench.policy.drafters import KINDS, TURNS_EVERY, Drafters
from outrider_lab.bench.policy.recorder import record_drafts
from outrider_lab.bench.policy.requests import requests_of
from outrider_lab.bench.policy.runs import VisitRunner, alone
from outrider_lab.bench.policy.session import read_policy_options
from outrider_lab.replay.recorded import Costs
from outrider_lab.replay.run import replay
from outrider_lab.simulation.recording import Recording, RecordingError, load_recording, save_recording

from adapters.contract import silent
from adapters.tokenizer import load_tokenizer
from device_profiles.cost import StepCost
from orchestrator.worker.drafting.port import Ask
from orchestrator.worker.loading.models import load_target
from orchestrator.worker.measuring.prompts import OWN_PROMPTS
from policies.sampling import Sampling

SUMMARY = {"worst_vs_plain", "vs_hindsight", "policy_us_per_round", "identical"}
CATEGORIES = ["explaining", "rewriting"]
COSTS = Costs(StepCost((1.0, 2.0, 4.0, 8.0, 16.0, 64.0), (7.0, 7.4, 8.4, 10.5, 16.0, 55.0), 0.2))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    directory = tmp_path_factory.mktemp("policy")
    path = directory / "cluster.yaml"
    path.write_text(
        "model: {source: 'simulated:toy?base_ms=0.3&row_ms=0.02', adapter: simulated, name: toy}\n"
        f"store: {{directory: {directory / 'store'}}}\n"
    )
    return path


@pytest.fixture(scope="module")
def target(config):
    options = read_policy_options(config, 4)
    loaded = load_target(options, silent)
    yield loaded, options
    loaded.model.close()


@pytest.fixture(scope="module")
def requests(target):
    loaded, _ = target
    return requests_of(OWN_PROMPTS, CATEGORIES, load_tokenizer(loaded.tokenizer_dir), count=3, max_tokens=40)


def test_it_runs_compares_records_and_replays_alone(outrider, config, tmp_path):
    few = ("--category", CATEGORIES[0], "--concurrency", 1, "--concurrency", 2, "--sample", 2, "--costs-s", 0.2)
    out, again, record = tmp_path / "out.json", tmp_path / "again.json", tmp_path / "recording.json"
    code, shown, errors = outrider(
        *("bench", "policy", "--config", config, *few, "--tokens", 24, "--json", out, "--record", record),
    )
    assert code == 0, errors
    found = json.loads(out.read_text())
    assert set(found["summary"]) == SUMMARY
    assert found["summary"]["identical"] is True
    assert found["summary"]["policy_us_per_round"] > 0.0
    assert "what lies within is the machine's noise" in shown
    assert "really run: plain and adaptive, 1 categories x 1, 2 at once" in shown
    assert {(row["concurrency"], row["drafter"]) for row in found["cells"]} == {(n, k) for n in (1, 2) for k in KINDS}
    assert found["summary"]["worst_vs_plain"] == min(row["ratio"] for row in found["cells"])
    policies = {row["policy"] for row in found["sample"] if row["concurrency"] == 2}
    assert {"control", "adaptive", "fixed-1", "fixed-8"} <= policies
    code, shown, errors = outrider("bench", "policy", "--replay", record, "--json", again)
    assert code == 0, errors
    alone = json.loads(again.read_text())
    assert alone["replay"] == found["replay"]  # nothing is lost in the file, and nothing is left to chance
    assert alone["summary"]["identical"] is None
    assert "policy_us_per_round: not measured" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--category", "cooking"), "--category 'cooking' is none of the file's: explaining, listing"),
        (("--concurrency", 2, "--sample", 4), "--sample 4 is none of the concurrencies: 2"),
        (("--json", "/nowhere/out.json"), "--json /nowhere/out.json: there is no such directory"),
        (("--replay", "/nowhere/recording"), "--replay /nowhere/recording: cannot be read"),
        (("--replay", "x", "--category", "a"), "--replay plays a recording as it is"),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line(outrider, arguments, said):
    code, _, errors = outrider("bench", "policy", *arguments)
    assert code == 1
    assert said in errors
    assert len(errors.strip().splitlines()) == 1


def test_a_plain_replay_makes_the_tokens_of_a_plain_run(target, requests):
    loaded, options = target
    submits = requests.all()
    runner = VisitRunner(loaded, options, lambda tokens: None)
    runner.read(submits)
    visit = alone(runner.begin(submits, [(0, 1)]))
    kinds = record_drafts(submits, visit.outputs, options, loaded, lambda: None)
    for kind in KINDS:
        played = replay(kinds[kind], policy_of(PLAIN, COSTS.forward), COSTS, concurrency=1, most=options.max_depth)
        assert played.tokens == visit.tokens == sum(len(output) - 1 for output in visit.outputs.values())
        assert len(played.steps) == len(visit.rounds)
    # A real round at a fixed depth accepts what the recording says is right. One request: nothing is remembered yet.
    timed = Timed(policy_of("fixed-4", COSTS.forward))
    real = alone(runner.begin(submits[:1], [(0, 1)], Drafters(options, loaded).of("good"), timed))
    fixed = policy_of("fixed-4", COSTS.forward)
    played = replay(kinds["good"][:1], fixed, COSTS, concurrency=1, most=options.max_depth)
    assert real.outputs[submits[0].request_id] == visit.outputs[submits[0].request_id]
    assert [step.accepted for step in played.steps] == [one.accepted for one in real.rounds]
    assert timed.spent_s >= sum(one.policy_us for one in real.rounds) / 1e6 > 0.0


def test_each_drafter_is_what_it_is_called(target, requests):
    """The good one is right often, the bad one nearly never, and the third is bad from its 50th token on."""
    loaded, options = target
    submit = requests.all()[0]
    output = [*submit.prompt[-8:]] * 20  # a text that repeats
    kinds = record_drafts([submit], {submit.request_id: output}, options, loaded, lambda: None)
    right = {kind: [draft.accepted > 0 for draft in found[0].drafts] for kind, found in kinds.items()}
    steady = slice(16, TURNS_EVERY - 1)
    assert all(right["good"][steady])
    assert all(right["alternating"][steady])
    turned = slice(TURNS_EVERY, 2 * TURNS_EVERY - 1)
    assert sum(right["bad"]) <= len(output) // 10
    assert sum(right["alternating"][turned]) <= TURNS_EVERY // 10
    assert all(right["alternating"][2 * TURNS_EVERY : 3 * TURNS_EVERY - 1])
    bad = Drafters(options, loaded).of("bad")
    bad.begin("a", [1, 2, 3], Sampling())
    (draft,) = bad.propose([Ask("a", 6)])
    assert len(draft.tokens) == 6
    assert min(draft.confidences) > 0.9


def test_a_recording_is_read_as_it_was_written_and_others_are_refused(target, requests, tmp_path):
    loaded, options = target
    outputs = {submit.request_id: [*submit.prompt[-12:]] * 3 for submit in requests.all()}
    kinds = record_drafts(requests.all(), outputs, options, loaded, lambda: None)
    made = Recording(kinds, COSTS, COSTS.forward, options.max_depth, 2, [1, 2], {"cpus": 2})
    path = tmp_path / "recording.json"
    save_recording(made, path)
    assert load_recording(path) == made
    assert made.categories() == CATEGORIES
    for content, said in (
        (path.read_text().replace('"version":1', '"version":7'), "version 7"),
        ("{", "no recording"),
        ('{"version": 1, "kinds": {}}', "no recording"),
    ):
        path.write_text(content)
        with pytest.raises(RecordingError, match=said):
            load_recording(path)


def test_drafters_live_on_behind_a_visit(target, requests):
    loaded, options = target
    submits = requests.all()[:1]
    runner = VisitRunner(loaded, options, lambda tokens: None)
    runner.read(submits)
    drafter = Drafters(options, loaded).of("good")
    closed: list[str] = []
    drafter.close = lambda: closed.append("closed")  # type: ignore[method-assign]  # what it would do to statistics
    alone(runner.begin(submits, [(0, 1)], drafter))
    assert closed == [], "the next visit has it, too"
