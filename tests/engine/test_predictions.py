"""Predicted outputs in the decode loop: right, edited or wrong, they never change a token; right ones save rounds."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.clock import SystemClock
from orchestrator.protocol.commands import Grammar, Submit
from orchestrator.protocol.packed_tokens import pack_tokens
from orchestrator.protocol.rounds import RoundReport
from orchestrator.worker.drafting.chain import ChainDrafter
from orchestrator.worker.drafting.prediction import PredictionDrafter
from orchestrator.worker.engine.variants import SpeculationVariants, VariantDepth
from tests.support.fixed_depth import FixedDepth
from tests.support.loops import alone, decode, loop_over, requests, suffix, toy

DEPTH = 40


def chain() -> ChainDrafter:
    return ChainDrafter([suffix()], PredictionDrafter(SystemClock()))


def predict(submits: list[Submit], texts: dict[str, list[int]]) -> list[Submit]:
    """The requests, each with its expected output."""
    return [msgspec.structs.replace(one, prediction=pack_tokens(texts[one.request_id])) for one in submits]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return alone(requests(6))


def run(submits: list[Submit], *, running: int = 8) -> tuple[dict[str, list[int]], list[RoundReport]]:
    return decode(loop_over(toy(), chain(), running=running, depth=DEPTH, policy=FixedDepth(DEPTH)), submits)


@pytest.mark.parametrize("running", [1, 8])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda text: text, id="right"),
        pytest.param(lambda text: [*text[:20], 33, 34, *text[21:]], id="edited"),
        pytest.param(lambda text: [33] * len(text), id="wrong"),
        pytest.param(lambda text: [1 << 30, *text], id="no tokens of the model"),
    ],
)
def test_no_prediction_changes_a_token(expected, running, change):
    changed = {key: change(text) for key, text in expected.items()}
    out, _ = run(predict(requests(6), changed), running=running)
    assert out == expected


def test_a_right_prediction_takes_few_rounds_and_is_counted(expected):
    submits = predict(requests(6)[:1], expected)
    out, rounds = run(submits)
    tokens = len(out["r0"])
    assert len(rounds) <= 2 + -(-tokens // (DEPTH + 1))
    stats = rounds[-1].deltas[-1].stats
    assert stats is not None
    assert 0 < stats.predicted_right <= stats.predicted <= stats.drafted
    assert stats.predicted_right >= tokens - len(rounds)


def test_a_request_that_is_moved_goes_on_in_its_prediction(expected):
    done = 23
    moved = [
        msgspec.structs.replace(one, committed=expected[one.request_id][:done])
        for one in predict(requests(6), expected)
        if len(expected[one.request_id]) > done + DEPTH // 2
    ]
    assert moved
    out, rounds = run(moved)
    assert all(out[one.request_id] == expected[one.request_id][done:] for one in moved)
    assert sum(one.accepted for one in rounds) >= 0.9 * sum(map(len, out.values())) - len(out) * len(rounds)
    assert len(rounds) <= 4


def test_grammars_penalties_and_bias_hold_for_predicted_tokens():
    shaped = [
        msgspec.structs.replace(one, grammar=Grammar("regex", "[a-d]{20,60}"), min_tokens=10) for one in requests(4)
    ]
    plain = alone(shaped)
    out, rounds = run(predict(shaped, plain))
    assert out == plain
    assert sum(one.by_drafter.get("prediction", (0, 0))[1] for one in rounds) > 0
    out, _ = run(predict(shaped, {key: [*b"zzz", *text] for key, text in plain.items()}))
    assert out == plain


def test_only_requests_with_a_prediction_have_its_bound():
    served = SpeculationVariants(VariantDepth(12), {}, predicted=64)
    plain = requests(1)[0]
    with_one = msgspec.structs.replace(plain, prediction=pack_tokens([1, 2]))
    assert served.apply_variant(plain).most_depth == 12
    assert served.apply_variant(with_one).most_depth == 64
    assert served.apply_variant(msgspec.structs.replace(with_one, most_depth=20)).most_depth == 20
    assert served.apply_variant(msgspec.structs.replace(with_one, depth=90)).depth == 64
    assert served.apply_variant(msgspec.structs.replace(plain, depth=90)).depth == 12
    assert SpeculationVariants(VariantDepth(0), {}, predicted=64).apply_variant(with_one).most_depth == 0
    fixed = SpeculationVariants(VariantDepth(12, fixed=True), {}, predicted=64)
    assert fixed.apply_variant(with_one).depth == 12
