"""Requests over real workers of which some do not do all that may be asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.clock import SystemClock
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.routing.abilities import find_missing_ability
from orchestrator.errors import RequestError
from orchestrator.launch.local import LocalCluster
from orchestrator.protocol.abilities import BEGUN_GRAMMAR, list_needs
from orchestrator.protocol.commands import Grammar, Submit
from policies.sampling import Dry, Sampling
from tests.control.test_controller import PROMPT, at_once
from tests.control.test_replicas import LIMITS, kill, list_generated, replicas
from tests.support import engines
from tests.support.ready import PLAIN, change_ready
from tests.support.waiting import until_async
from tests.support.workers import list_workers

SCHEMA = Grammar("json_schema", "{}")
ENDS = [999]


@asynccontextmanager
async def running(*options: dict[str, Any]) -> AsyncIterator[TargetControl]:
    """Control over workers with these options."""
    specs = [msgspec.structs.replace(engines.spec(**its), name=f"target-{n}") for n, its in enumerate(options)]
    control = TargetControl(LocalCluster(), specs, LIMITS, SystemClock(), at_once)
    await control.start()
    try:
        await until_async(lambda: [replica.phase for replica in replicas(control)] == ["ready"] * len(options))
        yield control
    finally:
        await control.close()
        assert not list_workers()


async def ask(control: TargetControl, key: str, tokens: int = 10, **fields: Any) -> list[int]:
    submit = Submit(key, PROMPT, tokens, **{"stop_tokens": ENDS, **fields})
    answer: list[int] = []
    async with aclosing(control.generate(submit)) as deltas:
        async for delta in deltas:
            answer.extend(delta.tokens)
    return answer


async def test_a_request_goes_only_where_what_it_asks_for_is_done_and_says_why() -> None:
    async with running({"cannot": ["logprobs"], "slots": 8}, {"step_s": 0.001}) as control:
        for number in range(4):
            assert await ask(control, f"r{number}", logprobs=0) == engines.tokens(PROMPT, 10)
        assert list_generated(control) == [0, 40]
        [route] = control.steering.explain("r3")
        why = {rated.name: rated.why_not for rated in route.rated}
        assert why["target-0"] == "does not do what is asked for: logprobs"
        assert await asyncio.gather(*(ask(control, f"p{n}") for n in range(6))) == [engines.tokens(PROMPT, 10)] * 6


async def test_a_request_for_an_adapter_goes_to_the_replicas_that_have_it_and_is_refused_where_none_does() -> None:
    async with running({"slots": 8}, {"loras": ["pirate"]}, {"loras": ["pirate", "poet"]}) as control:
        control.steering.hold("worker", "target-2", "cordoned")
        for number in range(4):
            assert await ask(control, f"r{number}", lora="pirate") == engines.tokens(PROMPT, 10)
        assert list_generated(control) == [0, 40, 0]
        control.steering.hold("worker", "target-2", "")
        assert await ask(control, "poet", lora="poet") == engines.tokens(PROMPT, 10)
        assert list_generated(control) == [0, 40, 10]
        with pytest.raises(RequestError, match="target-1 does not do adapter sailor") as refused:
            await ask(control, "sailor", lora="sailor")
        assert refused.value.param == "model"


async def test_what_no_replica_does_is_refused_by_its_name_before_it_waits() -> None:
    async with running({"cannot": ["grammar json_schema"]}, {"cannot": ["grammar json_schema", "logprobs"]}) as control:
        with pytest.raises(RequestError) as refused:
            await ask(control, "a", grammar=SCHEMA)
        assert (refused.value.status, refused.value.param) == (400, "response_format")
        assert "target-0 does not do grammar json_schema; target-1 does not do" in refused.value.message
        assert await ask(control, "b") == engines.tokens(PROMPT, 10)


async def test_an_answer_that_only_a_lost_replica_could_go_on_with_goes_to_one_that_can() -> None:
    limited = {"cannot": [BEGUN_GRAMMAR], "step_s": 0.003}
    async with running(limited, {"step_s": 0.003}) as control:
        control.steering.hold("worker", "target-1", "cordoned")
        task = asyncio.create_task(ask(control, "a", 200, grammar=SCHEMA))
        await until_async(lambda: list_generated(control)[0] > 5)
        control.steering.hold("worker", "target-1", "")
        kill(replicas(control)[0])
        assert await task == engines.tokens(PROMPT, 200)
        assert list_generated(control)[1] > 0


async def test_an_answer_that_nobody_can_go_on_with_ends_with_an_error() -> None:
    async with running({"cannot": [BEGUN_GRAMMAR], "step_s": 0.003}) as control:
        task = asyncio.create_task(ask(control, "a", 200, grammar=SCHEMA))
        await until_async(lambda: list_generated(control)[0] > 5)
        kill(replicas(control)[0])
        with pytest.raises(RequestError, match="no replica can go on") as refused:
            await task
        assert refused.value.status == 503


async def test_a_request_that_a_worker_gives_up_is_tried_at_another() -> None:
    async with running({"gives_up": True}, {}) as control:
        for number in range(3):
            assert await ask(control, f"r{number}") == engines.tokens(PROMPT, 10)


@given(
    st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 1.0]),
        top_k=st.sampled_from([0, 4]),
        min_p=st.sampled_from([0.0, 0.1]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        repetition_penalty=st.sampled_from([1.0, 1.1]),
        logit_bias=st.sampled_from([(), ((1, 2.0),)]),
        typical_p=st.sampled_from([1.0, 0.5]),
        xtc_probability=st.sampled_from([0.0, 0.5]),
        dry=st.sampled_from([None, Dry(1.0, 1.75, 2, -1, ())]),
    ),
    st.sampled_from([None, 0, 3]),
    st.sampled_from([None, SCHEMA]),
    st.booleans(),
)
def test_a_worker_takes_a_request_exactly_where_it_lacks_none_of_its_needs(
    sampling: Sampling, logprobs: int | None, grammar: Grammar | None, has_tokens: bool
) -> None:
    submit = Submit("a", [1], 4, sampling, stop_tokens=ENDS, logprobs=logprobs, grammar=grammar)
    needs = [ability for ability, _ in list_needs(submit, has_tokens=has_tokens)]
    assert not find_missing_ability(submit, PLAIN, has_tokens=has_tokens)
    for ability in needs:
        assert find_missing_ability(submit, change_ready(PLAIN, cannot=[ability]), has_tokens=has_tokens) == ability
    others = change_ready(PLAIN, cannot=["prompt_logprobs", "ignore_eos"])
    assert not find_missing_ability(submit, others, has_tokens=has_tokens)
