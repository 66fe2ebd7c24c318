"""What is measured inside a worker, over the simulated model and over links of this machine."""

import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.contract import LoadOptions, Segment, silent
from adapters.simulated.model import ToyModel
from adapters.simulated.script import Script
from device_profiles.acceptance import TargetTexts
from device_profiles.cost import StepCost
from device_profiles.measured import RoundOverhead
from orchestrator.clock import SystemClock
from orchestrator.planning.profiling.work import THIS_HOST, name_of, paths, probe_spec
from orchestrator.protocol.commands import Stop
from orchestrator.protocol.events import EndpointOpened, Event, Failed
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.links.endpoint import LinkLost
from orchestrator.worker.drafting.suffix import SuffixDrafter
from orchestrator.worker.measuring.links import EchoEngine, measure_link
from orchestrator.worker.measuring.pairs import DEPTHS, compare_choices, replay_drafter
from orchestrator.worker.measuring.quick import quick_cost
from orchestrator.worker.measuring.rounds import RoundSample, at_pace, fit_rounds
from orchestrator.worker.measuring.steps import measure_steps

PATTERN = tuple(range(20, 32))


def toy(script="", **options):
    return ToyModel(Script.parse(script), LoadOptions(device="SIM", kv_cache_bytes=64 << 20, slots=33, **options))


@pytest.mark.parametrize(
    "room", [{}, {"slots": 2}, {"max_batch_rows": 8}, {"kv_cache_bytes": 64 * 1024}, {"max_batch_rows": 40, "slots": 5}]
)
def test_forwards_are_measured_in_whatever_room_there_is(room):
    options = LoadOptions(**{"device": "SIM", "kv_cache_bytes": 64 << 20, "slots": 33, **room})
    model = ToyModel(Script.parse(""), options)
    steps = measure_steps(model, SystemClock(), silent, budget_s=0.05)
    assert steps.cost.ms(1) > 0.0
    assert steps.cost.prefill is not None
    assert model.free_blocks() == model.capabilities.total_blocks, "slots are empty again"
    quick_cost(model, SystemClock(), budget_s=1.0)
    assert model.free_blocks() == model.capabilities.total_blocks, "and again"


def test_a_few_forwards_tell_roughly_what_rows_cost():
    found = quick_cost(toy("base_ms=12&row_ms=3"), SystemClock(), budget_s=2.0)
    assert found is not None
    assert found.ms(9) == pytest.approx(39.0, rel=0.5)
    assert found.ms(1) < found.ms(5) < found.ms(9)
    assert found.changing_ms < 9.0
    assert quick_cost(toy("base_ms=4"), SystemClock(), budget_s=0.0) is None, "no time, no figures"


def test_a_model_that_takes_longer_is_measured_for_longer():
    found = quick_cost(toy("base_ms=40&row_ms=4"), SystemClock(), budget_s=0.01)
    assert found is not None
    assert found.ms(3) == pytest.approx(52.0, rel=0.3), "rows of short drafts are measured, whatever the budget"
    assert found.ms(4, 4) < found.ms(12, 4)


def round_of(sequences, rows, ms, *, changed=False, context=0.0, **more):
    return RoundSample(sequences, rows, context, ms, changed, **more)


@given(
    beside=st.builds(RoundOverhead, st.floats(0.1, 2.0), st.floats(0.0, 1.0), st.floats(0.0, 0.2)),
    changing=st.floats(0.0, 8.0),
    pace=st.floats(0.7, 1.6),
)
def test_rounds_are_explained_by_what_they_are_of(beside, changing, pace):
    cost = StepCost((1.0, 9.0), (8.0, 12.0), position_us=1.0)
    true = replace(cost, changing_ms=changing)
    rounds = [
        round_of(
            many,
            rows,
            true.ms(rows, many, 100.0, changes=float(changed)) + beside.ms(many, rows),
            changed=changed,
            context=100.0,
        )
        for many, rows in ((1, 1), (1, 5), (1, 9), (4, 4), (4, 12), (8, 8), (8, 30))
        for changed in (False, True)
        for _ in range(3)
    ]
    found, known = fit_rounds(rounds, cost)
    assert found.ms(4, 9) == pytest.approx(beside.ms(4, 9), rel=0.02, abs=0.02)
    assert known.changing_ms == pytest.approx(changing, rel=0.02, abs=0.02)
    stretched = []
    for one in rounds:
        beside_ms = found.ms(one.sequences, one.rows)
        stretched.append(replace(one, ms=pace * (one.ms - beside_ms) + beside_ms))
    assert at_pace(stretched, known, found).ms(5, 1, 100.0) == pytest.approx(pace * known.ms(5, 1, 100.0), rel=0.01)


def test_of_no_rounds_nothing_is_known():
    cost = StepCost((1.0, 9.0), (8.0, 12.0))
    assert fit_rounds([], cost) == (RoundOverhead(), cost)
    assert at_pace([], cost, RoundOverhead()) == cost
    early, _ = fit_rounds([round_of(1, 1, 1.0)], cost)  # faster than predicted: nothing is below zero
    assert early.ms(3, 9) == 0.0


def test_a_busy_machine_stretches_what_was_fitted_and_a_stall_hardly():
    cost, beside = StepCost((1.0, 8.0), (10.0, 17.0)), RoundOverhead(1.0)
    calm = [round_of(1, 1, 11.0)] * 39
    assert at_pace(calm, cost, beside).ms(1) == pytest.approx(10.0)
    stalled = at_pace([*calm, round_of(1, 1, 5000.0)], cost, beside)
    assert stalled.ms(1) == pytest.approx(10.5), "a stall counts as three rounds, of forty"
    assert at_pace([round_of(1, 1, 11.0), round_of(1, 8, 27.0)] * 20, cost, beside).ms(1) > 12.0


def test_prompts_are_paced_by_their_own_rounds():
    cost = StepCost((1.0, 8.0), (10.0, 17.0), prefill=StepCost((10.0, 20.0), (15.0, 25.0)))
    rounds = [round_of(1, 1, 10.0)] * 20 + [round_of(0, 0, 30.0, prompt_rows=10)] * 6
    found = at_pace(rounds, cost, RoundOverhead())
    assert found.ms(1) == pytest.approx(10.0)
    assert found.prefill_ms(10) == pytest.approx(30.0)
    few = at_pace(rounds[:-2], cost, RoundOverhead())
    assert few.prefill_ms(10) == pytest.approx(15.0), "too few to tell"


def texts(*outputs):
    return TargetTexts("t", "d", "chat", tuple(PATTERN for _ in outputs), tuple(tuple(one) for one in outputs))


def suffix():
    return SuffixDrafter(max_match=16, memory_bytes=0, clock=SystemClock())


def test_a_text_that_repeats_its_prompt_accepts_all_drafts():
    known = texts((*PATTERN, *PATTERN, *PATTERN))
    found = replay_drafter(suffix, known, min_rows=1, clock=SystemClock())
    assert [one.depth for one in found.by_depth] == list(DEPTHS)
    for one in found.by_depth:
        assert one.accepted == one.offered
    assert found.by_depth[0].tokens == pytest.approx(2.0, abs=0.15)
    assert found.by_depth[-1].tokens > 7.0
    assert found.draft_ms > 0.0


def test_a_text_of_new_tokens_accepts_nothing():
    known = texts(range(100, 140))
    found = replay_drafter(suffix, known, min_rows=1, clock=SystemClock())
    assert [one.tokens for one in found.by_depth] == [1.0] * len(DEPTHS)


def test_a_model_that_says_the_same_is_right_at_every_depth():
    model = toy()
    output: list[int] = []
    for _ in range(40):
        text = [*PATTERN, *output]
        rows = model.forward([Segment(0, 0, text, (len(text) - 1, len(text)))]).logits
        output.append(int(rows[0].argmax()))
        model.release(0)
    for one in compare_choices(model, texts(output)):
        assert one.accepted[0] == 1.0
        assert one.offered == one.accepted
    other = compare_choices(model, texts([(token + 1) % 200 for token in output]))
    assert other[-1].tokens < 2.0


def test_a_link_is_measured_through_its_door_again_and_again():
    events, opened = [], threading.Event()
    echo = EchoEngine("127.0.0.1")

    def emit(event):
        events.append(event)
        opened.set()

    worker = threading.Thread(target=echo.run, args=(emit,))
    worker.start()
    assert opened.wait(60.0)
    assert isinstance(events[0], EndpointOpened)
    endpoint = events[0].endpoint
    kinds = [address.partition(":")[0] for address in endpoint.addresses]
    assert kinds == ["unix", "tcp"]
    for address in endpoint.addresses:
        (link,) = measure_link(LinkEndpoint([address], endpoint.key, endpoint.certificate), "here", "there")
        assert (link.left, link.right, link.source) == ("here", "there", "measured")
        assert 0.001 < link.rtt_ms < 100.0
        assert link.bytes_per_s > 1e6
    echo.submit(Stop())
    worker.join(60.0)
    assert not worker.is_alive()
    with pytest.raises(LinkLost):
        list(measure_link(endpoint, "here", "there"))


def test_an_address_of_another_machine_opens_no_door():
    events: list[Event] = []
    EchoEngine("192.0.2.1").run(events.append)
    assert isinstance(events[0], Failed)
    assert "192.0.2.1" in events[0].message


def test_every_two_nodes_have_a_path():
    assert paths([""]) == [("", "")]
    assert paths(["a", "b", "c"]) == [("a", "a"), ("b", "b"), ("c", "c"), ("a", "b"), ("a", "c"), ("b", "c")]
    assert name_of("") == THIS_HOST
    spec = probe_spec(LinkEndpoint(["unix:@x"], b"key"), "a", "b")
    assert (spec.node, spec.options["left"], spec.options["right"]) == ("a", "a", "b")
