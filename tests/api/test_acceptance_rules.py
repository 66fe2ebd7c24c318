"""The acceptance rule of a request: asked for, bounded by the operator, and told in the answer."""

from typing import Any

import pytest
from openai import BadRequestError

from orchestrator.daemon.api.question import system_fingerprint
from orchestrator.daemon.api.translate import AcceptanceBounds
from tests.api.support import READY, ScriptedControl, app_over, client_of
from tests.support.ready import change_ready

ALL = AcceptanceBounds(tolerance=True)


async def ask(
    rule: str | None, *, bounds: AcceptanceBounds, control: ScriptedControl | None = None, **body: Any
) -> tuple[Any, Any]:
    """A chat's headers, and its answer or its last chunk."""
    config = {} if rule is None else {"speculative_config": {"acceptance": rule}}
    async with client_of(app_over(control or ScriptedControl(), acceptance=bounds)) as client:
        response = await client.chat.completions.with_raw_response.create(
            model="toy", messages=[{"role": "user", "content": "x"}], extra_body=config, **body
        )
        answer: Any = response.parse()
        return response.headers, [chunk async for chunk in answer][-1] if body.get("stream") else answer


@pytest.mark.parametrize("rule", ["coupled", "rejection", "tolerance"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_rule_reaches_the_decode_loop_and_the_answer_says_which_it_was(rule, stream):
    control = ScriptedControl()
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    headers, answer = await ask(rule, bounds=ALL, control=control, **more)
    assert [submit.sampling.acceptance for submit in control.submits] == [rule]
    assert headers["X-Outrider-Acceptance"] == rule
    told = answer.metrics["speculative_decoding"]
    assert (told["acceptance"], told["tolerance_delta"]) == (rule, None)
    assert answer.system_fingerprint == system_fingerprint(READY, rule)


async def test_at_temperature_0_the_lossless_rules_are_one():
    for rule, told in (("coupled", "greedy"), ("rejection", "greedy"), ("tolerance", "tolerance")):
        headers, _ = await ask(rule, bounds=ALL, temperature=0.0)
        assert headers["X-Outrider-Acceptance"] == told


@pytest.mark.parametrize(
    ("bounds", "rule"),
    [
        (AcceptanceBounds(), "coupled"),
        (AcceptanceBounds("rejection"), "rejection"),
        (AcceptanceBounds("tolerance"), "tolerance"),
        (AcceptanceBounds("coupled", tolerance=True), "coupled"),
    ],
)
async def test_who_asks_for_nothing_gets_the_operators_rule(bounds, rule):
    control = ScriptedControl()
    await ask(None, bounds=bounds, control=control)
    assert control.submits[0].sampling.acceptance == rule


async def test_tolerance_is_refused_where_the_operator_does_not_allow_it():
    control = ScriptedControl()
    for bounds in (AcceptanceBounds(), AcceptanceBounds("rejection")):
        with pytest.raises(BadRequestError) as refused:
            await ask("tolerance", bounds=bounds, control=control)
        assert refused.value.param == "speculative_config.acceptance"
        assert refused.value.code == "lossy_not_allowed"
        assert "speculation.allow_tolerance" in str(refused.value)
    assert control.submits == []
    await ask("tolerance", bounds=AcceptanceBounds("tolerance"), control=control)
    assert control.submits[0].sampling.acceptance == "tolerance"


async def test_an_unknown_rule_is_refused_with_the_known_ones():
    with pytest.raises(BadRequestError, match="rejection") as refused:
        await ask("typical", bounds=ALL)
    assert refused.value.param == "speculative_config.acceptance"


async def test_the_answer_has_the_tolerance_that_drafts_were_judged_with():
    control = ScriptedControl(tolerance_delta=0.75)
    for count in (1, 2):
        _, answer = await ask("tolerance", bounds=ALL, control=control, n=count)
        assert answer.metrics["speculative_decoding"]["tolerance_delta"] == 0.75


def test_the_fingerprint_has_what_the_tokens_depend_on():
    deeper = change_ready(READY, max_depth=9)
    assert system_fingerprint(READY, "greedy") == system_fingerprint(READY, "coupled") == system_fingerprint(READY)
    assert system_fingerprint(deeper, "coupled") == system_fingerprint(READY)
    told = {system_fingerprint(ready, rule) for ready in (READY, deeper) for rule in ("rejection", "tolerance")}
    assert len(told | {system_fingerprint(READY)}) == 5
