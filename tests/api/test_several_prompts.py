"""Several prompts in one completion: choices in order, each as its prompt gets it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from orchestrator.clock import SystemClock
from orchestrator.config.model import JournalSection
from orchestrator.daemon.api.wire import MAX_SEQUENCES
from orchestrator.daemon.journal.book import AnswerBook
from tests.api.support import CONTEXT_TOKENS, EOS, ScriptedControl, app_over, client_of, serving
from tests.support.daemon import Daemon, configuration, running

ASK: dict[str, Any] = {"model": "toy", "max_tokens": 6, "temperature": 1.0}
PROMPTS: list[Any] = [
    ["one", "two and more", "three"],
    [list(b"one"), list(b"two and more")],
    [[111, 110, 101]],
    ["alone"],
]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with running(configuration(tmp_path_factory.mktemp("prompts"))) as found:
        yield found


def single(daemon: Daemon, prompt: Any, **fields: Any) -> Any:
    return daemon.client.completions.create(**ASK | fields, prompt=prompt)


@pytest.mark.parametrize("prompts", PROMPTS, ids=["texts", "ids", "one-list-of-ids", "one-text"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("fields", [{}, {"echo": True, "logprobs": 2}, {"stop": ["e"]}], ids=["plain", "echo", "stop"])
def test_each_prompt_gets_what_it_gets_alone(daemon: Daemon, prompts: list[Any], n: int, fields: dict[str, Any]):
    alone = [single(daemon, prompt, n=n, seed=7, **fields) for prompt in prompts]
    together = daemon.client.completions.create(**ASK | fields, prompt=prompts, n=n, seed=7)
    assert [choice.index for choice in together.choices] == list(range(len(prompts) * n))
    expected = [choice for answer in alone for choice in answer.choices]
    for one, other in zip(together.choices, expected, strict=True):
        assert (one.text, one.finish_reason, one.logprobs) == (other.text, other.finish_reason, other.logprobs)
    assert together.usage is not None
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(together.usage, name) == sum(getattr(answer.usage, name) for answer in alone)


@pytest.mark.parametrize("fields", [{}, {"echo": True, "logprobs": 1}], ids=["plain", "echo"])
def test_streams_go_by_index(daemon: Daemon, fields: dict[str, Any]):
    asked = ASK | fields | {"prompt": ["one", "two and more", "three"], "n": 2, "seed": 7}
    whole = daemon.client.completions.create(**asked)
    options = {"include_usage": True, "continuous_usage_stats": True}
    texts, finishes, prompts = [""] * 6, [""] * 6, [0] * 6
    with daemon.client.completions.create(**asked, stream=True, stream_options=options) as stream:  # type: ignore[call-overload]
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                finishes[choice.index] = choice.finish_reason or ""
                prompts[choice.index] = chunk.usage.prompt_tokens
            usage = chunk.usage
    assert texts == [choice.text for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    assert prompts == [3, 3, 12, 12, 5, 5]
    assert (usage.prompt_tokens, usage.completion_tokens) == (20, whole.usage.completion_tokens)


def test_prompts_without_a_seed_are_drawn_apart(daemon: Daemon):
    found = daemon.client.completions.create(**ASK | {"max_tokens": 24}, prompt=["same"] * 8)
    assert len({choice.text for choice in found.choices}) > 1


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "an empty list asks for nothing"),
        ([[]], "prompt is empty"),
        (["a", []], "another kind"),
        ([[97], []], "'prompt.1' is empty"),
        ([""], "prompt is empty"),
        (["a", 97], "another kind"),
        ([97, "a"], "another kind"),
        ([[97], "a"], "another kind"),
        ([[97], 97], "another kind"),
        ([97, True], "another kind"),
        ([True], "no token id"),
        ([[97, None]], "no token id"),
        ([[[97]]], "no token id"),
        ([97.0], "no token id"),
        ([None], "no token id"),
        (None, "'prompt' is missing"),
        ({}, "send a text"),
        (97, "send a text"),
        ([[97], [10**9]], "token 1000000000 is outside"),
        ([[97], [-1]], "token -1 is outside"),
    ],
)
async def test_what_is_no_prompt_is_refused_in_words_of_its_own(prompt: Any, says: str):
    async with serving(app_over(ScriptedControl())) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post("/v1/completions", json={"model": "toy", "prompt": prompt})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"].partition(".")[0]) == (400, "prompt"), error
    assert says in error["message"]
    assert len(error["message"]) < 200


@pytest.mark.parametrize(("prompts", "n"), [(MAX_SEQUENCES + 1, 1), (MAX_SEQUENCES // 16 + 1, 16), (20_000, 1)])
async def test_the_sequences_of_one_request_are_bounded(prompts: int, n: int):
    control = ScriptedControl()
    async with client_of(app_over(control, max_body=2**22)) as client:
        with pytest.raises(openai.BadRequestError, match=f"{prompts} prompts, with 'n' {n}.* {MAX_SEQUENCES} at most"):
            await client.completions.create(**ASK, prompt=["a"] * prompts, n=n)
        assert not control.submits
        found = await client.completions.create(**ASK, prompt=["a"] * (MAX_SEQUENCES // n), n=n)
    assert len(found.choices) == len(control.submits) == MAX_SEQUENCES // n * n


@pytest.mark.parametrize("size", [80, 20_000], ids=["counted", "by-its-bytes"])
@pytest.mark.parametrize("ids", [False, True])
async def test_the_one_that_is_too_long_is_named(size: int, *, ids: bool):
    prompts: list[Any] = [[97], [97] * size] if ids else ["a", "a" * size]
    async with client_of(app_over(ScriptedControl())) as client:
        with pytest.raises(openai.BadRequestError, match=f"maximum context length is {CONTEXT_TOKENS}") as refused:
            await client.completions.create(**ASK, prompt=prompts)
    assert refused.value.param == "prompt.1"


async def test_many_prompts_that_fit_one_by_one_are_no_long_prompt():
    async with client_of(app_over(ScriptedControl(), max_body=2**20)) as client:
        texts = [("word " * 10)[:40]] * 100
        assert len((await client.completions.create(**ASK, prompt=texts)).choices) == 100
        ids = [[120] * 50] * 128
        assert len((await client.completions.create(**ASK, prompt=ids)).choices) == 128


def test_each_choice_takes_a_place(tmp_path: Path):
    limits = "limits: {max_running: 2, max_waiting: 3}"
    with running(configuration(tmp_path, script="base_ms=5", extra=limits)) as daemon:
        assert len(single(daemon, ["a"] * 5).choices) == 5
        with pytest.raises(openai.BadRequestError, match="6 choices, and 5 run or wait here") as refused:
            single(daemon, ["a", "b", "c"], n=2)
        assert refused.value.code == "too_many_choices"
        with daemon.client.completions.create(**ASK | {"max_tokens": 2000}, prompt="a", stream=True) as busy:
            next(iter(busy))
            with pytest.raises(openai.RateLimitError) as full:
                single(daemon, ["a"] * 5)
            assert full.value.code == "queue_full"
            assert len(single(daemon, ["a"] * 4).choices) == 4


@pytest.mark.parametrize("end", [EOS, 107])
async def test_a_token_that_ends_an_echoed_answer_is_scored_too(end: int):
    """Harnesses score a text by all tokens but the last, which they asked to be made."""
    control = ScoredControl(steps=[[end]], finish="stop")
    async with client_of(app_over(control)) as client:
        asked = ASK | {"max_tokens": 1, "echo": True, "logprobs": 1, "extra_body": {"stop_token_ids": [107]}}
        found = await client.completions.create(**asked, prompt=[[97, 98, 99]])
        plain = await client.completions.create(**asked | {"echo": False}, prompt=[[97, 98, 99]])
    scores = found.choices[0].logprobs
    assert scores is not None
    assert found.choices[0].text == "abc"
    assert scores.token_logprobs == [None, -1.0, -1.0, -2.0]
    assert scores.text_offset == [0, 1, 2, 3]
    assert plain.choices[0].logprobs is not None
    assert plain.choices[0].logprobs.token_logprobs == []


async def test_a_stream_of_several_prompts_goes_on_behind_an_event():
    book = AnswerBook(JournalSection(detached_s=60.0), SystemClock())
    body = ASK | {"prompt": ["one", "two"], "stream": True, "n": 2}
    async with serving(app_over(ScriptedControl(), book=book)) as url, httpx.AsyncClient(base_url=url) as client:
        headers = {"Accept": "text/event-stream", "Idempotency-Key": "k"}
        whole = await read_events(client, body, headers)
        for name, _ in whole[:-1]:
            rest = await read_events(client, body, {"Last-Event-ID": name} | headers)
            place = [one for one, _ in whole].index(name)
            assert sorted(data for _, data in rest) == sorted(data for _, data in whole[place + 1 :])


def test_memory_of_kept_answers_counts_each_prompt(tmp_path: Path):
    from orchestrator.daemon.journal.book import KeptAnswer, KeptChoice
    from orchestrator.protocol.commands import Submit
    from policies.sampling import Sampling

    def submit(prompt: list[int]) -> KeptChoice:
        return KeptChoice(Submit("x", prompt, 1, Sampling(), []))

    def measure(choices: list[KeptChoice]) -> int:
        return KeptAnswer(1, "x", "", "", "", 0, choices).measure_bytes()

    shared = [97] * 100
    one = measure([submit(shared)])
    assert measure([submit(shared), submit(shared)]) == one
    assert measure([submit(shared), submit([98] * 100)]) > one


class ScoredControl(ScriptedControl):
    """Scores the prompt's tokens -1, and those of the answer -2."""

    async def generate(self, submit: Any) -> Any:
        import msgspec

        from policies.sampling.logprobs import TokenScore

        async for delta in super().generate(submit):
            prompt = [TokenScore(-1.0, ())] * (len(submit.prompt) - 1) if submit.prompt_logprobs else None
            scores = [TokenScore(-2.0, ())] * len(delta.tokens)
            yield msgspec.structs.replace(delta, logprobs=scores, prompt_logprobs=prompt)


async def read_events(
    client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]
) -> list[tuple[str, str]]:
    """(id, data) of each event."""
    answer = await client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: list[tuple[str, str]] = []
    for event in answer.text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        found.append((fields.get("id", ""), fields["data"]))
    return found
