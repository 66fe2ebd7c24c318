"""A request's own time limit, and prompts that begin alike, as the real `openai` client sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.daemon import Daemon, configuration, running

ASK: dict[str, Any] = {"model": "toy", "temperature": 0}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory) -> Iterator[Daemon]:
    extra = "limits: {max_running: 1, max_waiting: 4}"
    with running(configuration(tmp_path_factory.mktemp("api"), script="base_ms=5", extra=extra)) as started:
        yield started
        assert started.stop() == 0


def test_an_answer_ends_at_its_deadline_with_what_it_has(daemon):
    whole = daemon.client.completions.create(
        **ASK, prompt="go on", max_tokens=3000, extra_body={"timeout_s": 0.5, "ignore_eos": True}
    )
    choice = whole.choices[0]
    assert (choice.finish_reason, choice.model_extra["stop_reason"]) == ("length", "deadline")
    assert choice.text
    assert whole.usage is not None
    assert 0 < whole.usage.completion_tokens < 3000
    again = daemon.client.completions.create(**ASK, prompt="go on", max_tokens=20, extra_body={"ignore_eos": True})
    assert choice.text.startswith(again.choices[0].text)


def test_a_request_that_never_got_its_turn_is_told_so(daemon):
    stream = daemon.client.completions.create(
        **ASK, prompt="long", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    with pytest.raises(openai.APIStatusError) as late:
        daemon.client.with_options(max_retries=0).completions.create(
            **ASK, prompt="b", max_tokens=5, extra_body={"timeout_s": 0.2}
        )
    stream.close()
    assert late.value.status_code == 504
    assert late.value.code == "deadline_exceeded"


@pytest.mark.parametrize("wrong", [0, -1, "soon", 1e9])
def test_a_limit_that_is_none_is_refused(daemon, wrong):
    with pytest.raises(openai.BadRequestError, match="timeout_s"):
        daemon.client.completions.create(**ASK, prompt="b", max_tokens=5, extra_body={"timeout_s": wrong})


def test_the_usage_says_how_much_of_a_prompt_was_remembered(daemon):
    counts = []
    for question in ("who?", "when?"):
        usage = daemon.client.completions.create(**ASK, prompt="remember this " * 8 + question, max_tokens=5).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        counts.append(usage.prompt_tokens_details.cached_tokens)
    assert counts == [0, 112]  # full blocks of 16 tokens
