"""A drafter on a llama-server: the same output whatever the server does, and drafts again when it is well."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.tokenizer import Tokenizer
from orchestrator.clock import SystemClock
from orchestrator.protocol.draft_messages import DraftLink
from orchestrator.worker.drafting.llama_server.client import LlamaServerClient
from orchestrator.worker.drafting.llama_server.greeting import LlamaServer, ServerGreeter, is_here
from orchestrator.worker.drafting.port import Ask
from orchestrator.worker.drafting.remote.drafter import RemoteDrafter, RemoteLimits
from orchestrator.worker.vocabulary_corpus import list_corpus
from policies.speculation.draft_request import ServerPace, count_asked_tokens, observe_server_answer
from policies.speculation.draft_wait import RESTS_AFTER
from tests.drafting.test_drawn_remote import InStep
from tests.drafting.test_remote import REQUESTS, remote_of, requests, until
from tests.support.drafters import texts_of
from tests.support.fixed_depth import FixedDepth
from tests.support.loops import decode, loop_over, toy
from tests.support.scripted_llama_server import ScriptedLlamaServer, serve_by_script

SOON_S = 0.05


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Target-only decoding, one request at a time."""
    return {s.request_id: decode(loop_over(toy(), None, running=1), [s])[0][s.request_id] for s in REQUESTS}


@pytest.fixture(scope="module")
def texts(expected) -> list[list[int]]:
    return texts_of(REQUESTS, expected)


@contextmanager
def drafting(
    server: ScriptedLlamaServer, *, overlap: Any = "always", key_file: str = "", **limits: Any
) -> Iterator[tuple[RemoteDrafter, list[DraftLink]]]:
    """A drafter that is to draft by a server and waits for whatever it asked for, and what it reports."""
    reports: list[DraftLink] = []
    limits = {"max_wait_ms": 1000.0, "retry_s": SOON_S} | limits
    answer_timeout_s = limits.get("answer_timeout_s", 20.0)
    drafter = InStep(
        "model",
        greet=ServerGreeter("model", Tokenizer.bytes_only(), overlap, answer_timeout_s),
        limits=RemoteLimits(**limits),
        clock=SystemClock(),
        report=reports.append,
    )
    try:
        drafter.attach(LlamaServer(server.url, key_file))
        until(lambda: reports)
        yield drafter, reports
    finally:
        drafter.close()


def decode_all(drafter: RemoteDrafter, running: int = 6) -> tuple[dict[str, list[int]], int]:
    """Return the outputs of all requests, and how many drafted tokens were accepted."""
    loop = loop_over(toy(script="base_ms=3"), drafter, running=running, policy=FixedDepth(12))
    out, rounds = decode(loop, REQUESTS)
    return out, sum(done.accepted for done in rounds)


@pytest.mark.parametrize("overlap", ["never", "always"])
@pytest.mark.parametrize("wrong_every", [0, 3, 7])
@pytest.mark.parametrize("running", [1, 6])
def test_the_output_is_the_targets_and_drafts_are_accepted(expected, texts, wrong_every, running, overlap):
    with (
        serve_by_script(texts, wrong_every=wrong_every) as server,
        drafting(server, overlap=overlap) as (drafter, _),
    ):
        out, accepted = decode_all(drafter, running)
        assert out == expected
        assert accepted > 20 or overlap == "never"  # a machine that is too slow does not ask there
        (state,) = drafter.states()
        assert (state.state, state.adapter, state.weights) == ("ok", "llama-server", "F16")
        assert state.source == f"bytes.gguf on {server.url}"
        remote = remote_of(drafter)
        assert 0 <= remote.asks - remote.in_time - remote.late <= 1
        assert remote.runs_ahead == (overlap == "always")
        assert remote.sent_bytes > 0 < remote.received_bytes


def test_a_server_drafts_for_as_many_sequences_as_it_has_slots(expected, texts):
    with serve_by_script(texts, slots=2) as server, drafting(server) as (drafter, _):
        out, accepted = decode_all(drafter)
        assert out == expected
        assert accepted > 20
        assert server.most_busy <= 2


def test_targets_may_share_a_server(expected, texts):
    with serve_by_script(texts, slots=1) as server, drafting(server) as (one, _), drafting(server) as (other, _):
        with ThreadPoolExecutor(2) as pool:
            done = list(pool.map(lambda drafter: decode_all(drafter, 1), (one, other)))
        assert [out for out, _ in done] == [expected, expected]
        assert min(accepted for _, accepted in done) > 20
        assert server.most_busy == 1


def test_what_a_request_waits_for_others_at_a_server_is_part_of_its_price(texts):
    with serve_by_script(texts, slots=1, token_ms=2.0) as server, ThreadPoolExecutor(1) as pool:
        client = LlamaServerClient(server.url, "", 60.0)
        server.places.acquire()  # as another target's request
        pending = pool.submit(client.complete, texts[0][:3], 4)
        until(pending.running)
        time.sleep(0.3)
        server.places.release()
        completion = pending.result()
        client.close()
    assert completion.way_ms > 100.0 > completion.took_ms
    alone, shared = (
        observe_server_answer(ServerPace(), completion.confidences, completion.took_ms, 1, queue_ms)
        for queue_ms in (0.0, completion.way_ms)
    )
    assert count_asked_tokens(shared, 16, 20.0, 0.0) < count_asked_tokens(alone, 16, 20.0, 0.0)


def test_a_server_that_closes_all_connections_that_were_kept_is_asked_over_a_new_one(texts):
    with serve_by_script(texts) as server, ThreadPoolExecutor(3) as pool:
        client = LlamaServerClient(server.url, "", 60.0)
        server.kept_requests, server.drops = 1, True
        together, answer = threading.Barrier(3), server.answer

        def answer_together(path: str, body: dict[str, Any]) -> tuple[int, Any]:
            together.wait(60.0)
            return answer(path, body)

        server.answer = answer_together  # type: ignore[method-assign]
        pending = [pool.submit(client.complete, texts[0][:3], 4) for _ in range(3)]
        assert [completion.result().tokens for completion in pending] == [tuple(texts[0][3:7])] * 3
        server.answer = answer  # type: ignore[method-assign]
        assert client.complete(texts[0][:3], 4).tokens == tuple(texts[0][3:7])
        client.close()


def test_a_server_that_nobody_asks_any_more_drafts_nothing_ahead(expected, texts):
    asks = [Ask(submit.request_id, 4, round_ms=10.0, fixed=False) for submit in REQUESTS[:1]]
    (key,) = {ask.key for ask in asks}
    text = texts[0][len(REQUESTS[0].prompt) :]
    with serve_by_script(texts) as server, drafting(server) as (drafter, _):
        propose = partial(RemoteDrafter.propose, drafter)  # as in a loop, once a round
        drafter.begin(key, REQUESTS[0].prompt, REQUESTS[0].sampling)
        until(lambda: propose(asks)[0].tokens)
        assert drafter.describe_beside().computes
        resting = [replace(ask, cheap_only=True) for ask in asks]
        for count in range(RESTS_AFTER + 4):
            drafter.extend(key, text[count : count + 1])
            propose(resting)
        until(lambda: not server.busy)
        assert not drafter.describe_beside().computes
        before = len(server.prompts)
        for count in range(RESTS_AFTER + 4, 40):
            drafter.extend(key, text[count : count + 1])
            propose(resting)
            time.sleep(0.002)
        assert len(server.prompts) <= before + 1  # one may have been on its way
        until(lambda: propose(asks)[0].tokens)


@pytest.mark.parametrize("fault", ["outside", "many", "nonsense", "text", "refused"])
def test_what_makes_no_sense_is_told_and_the_server_tried_again(expected, texts, fault):
    with serve_by_script(texts) as server, drafting(server) as (drafter, reports):
        server.fault = fault
        out, accepted = decode_all(drafter)
        assert (out, accepted) == (expected, 0)
        garbage = next(report for report in reports if report.state == "garbage")
        assert garbage.reason
        server.fault = ""
        until(lambda: drafter.states()[0].state == "ok")
        out, accepted = decode_all(drafter)
        assert out == expected
        assert accepted > 20


@pytest.mark.parametrize("fault", ["loading", "closed", "broken"])
def test_a_server_that_cannot_now_is_lost_until_it_can(expected, texts, fault):
    with serve_by_script(texts) as server, drafting(server) as (drafter, reports):
        server.fault = fault
        out, accepted = decode_all(drafter)
        assert (out, accepted) == (expected, 0)
        assert "lost" in {report.state for report in reports}
        assert reports[-1].state != "lost" or not drafter.describe_beside().computes
        server.fault = ""
        until(lambda: drafter.states()[0].state == "ok")
        assert decode_all(drafter)[1] > 20


@pytest.mark.parametrize("fault", ["too long", "silent"])
def test_a_sequence_that_it_cannot_draft_for_holds_up_nobody(expected, texts, fault):
    with serve_by_script(texts) as server, drafting(server) as (drafter, reports):
        server.fault = fault
        out, accepted = decode_all(drafter)
        assert (out, accepted) == (expected, 0)
        assert [(report.state, report.reason) for report in reports] == [("connected", "")]
        assert len(server.prompts) <= sum(len(tokens) for tokens in expected.values())


def test_another_vocabulary_is_refused_with_the_way_out_until_it_fits(texts):
    with serve_by_script(texts) as server:
        server.fault = "vocabulary"
        with drafting(server) as (drafter, reports):
            assert reports[0].state == "refused"
            assert "another vocabulary than the target: id 85 is 'T' there and 'U' here" in reports[0].reason
            assert "mismatched_vocabulary: translate" in drafter.states()[0].reason
            server.fault = ""
            until(lambda: drafter.states()[0].state == "ok")


def test_a_key_is_read_with_every_connection(texts, tmp_path):
    key_file = tmp_path / "key"
    key_file.write_text("old\n")
    with serve_by_script(texts) as server:
        server.key = "new"
        with drafting(server, key_file=str(key_file)) as (drafter, reports):
            assert reports[0].state == "refused"
            assert "Invalid API Key" in reports[0].reason
            key_file.write_text("new\n")
            until(lambda: drafter.states()[0].state == "ok")


def test_a_server_that_does_not_answer_is_given_up_and_no_round_waits_for_it(expected, texts):
    slow_ms = 60_000.0 / 12
    with serve_by_script(texts) as server, drafting(server, answer_timeout_s=0.2) as (drafter, reports):
        server.token_ms = slow_ms
        loop = loop_over(toy(script="base_ms=3"), drafter, policy=FixedDepth(12))
        out, _ = decode(loop, requests(6))
        assert out == expected
        until(lambda: drafter.propose([]) or {"hung", "lost"} & {report.state for report in reports})


def test_texts_to_compare_over_have_the_whole_vocabulary_in_them():
    tokenizer = Tokenizer.bytes_only()
    corpus = list(list_corpus(tokenizer))
    assert {byte for text in corpus for byte in text.encode()} >= {*range(32, 127)}
    assert "<|end|>" in corpus[-1]
    assert "<|start|>" in corpus[-1]


def test_a_server_of_this_machine_is_known_as_such():
    assert is_here("http://127.0.0.1:8080")
    assert is_here("http://localhost:8080")
    assert not is_here("http://192.0.2.7:8080")


def test_tokens_inside_a_character_are_as_sure_as_its_last(texts):
    with serve_by_script(texts) as server:
        told = [{"id": 7, "logprob": -0.5}, {"id": 9, "logprob": None}]
        server.answer = lambda path, body: (  # type: ignore[method-assign]
            200,
            {"tokens": [5, 6, 7, 9, 8], "completion_probabilities": told, "timings": {"prompt_n": 3}},
        )
        client = LlamaServerClient(server.url, "", 5.0)
        completion = client.complete([1, 2], 5)
        client.close()
    assert completion.tokens == (5, 6, 7, 9, 8)
    assert completion.confidences == (*(math.exp(-0.5),) * 3, 0.0, 1.0)


@given(
    st.lists(
        st.tuples(st.lists(st.floats(0, 1), max_size=12), st.floats(0, 1e6), st.integers(0, 9999), st.floats(0, 1e4)),
        max_size=20,
    ),
    st.integers(1, 64),
    st.floats(0, 1e5),
    st.floats(0, 1e5),
)
def test_as_many_tokens_are_asked_for_as_are_in_time_and_worth_it(answers, limit, within_ms, round_ms):
    pace = ServerPace()
    for confidences, took_ms, read, queue_ms in answers:
        pace = observe_server_answer(pace, tuple(confidences), took_ms, read, queue_ms)
    count = count_asked_tokens(pace, limit, within_ms, round_ms)
    assert 1 <= count <= limit
    if within_ms and pace.token_ms and count > 1:
        assert pace.queue_ms + count * pace.token_ms <= within_ms * (1.0 + 1e-9)
    if round_ms and count > 1:
        assert max(0.01, min(0.99, pace.chance)) ** count * round_ms >= pace.token_ms * 0.999
