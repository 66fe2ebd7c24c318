"""A pool of two real llama-servers and a worker of ours: its members are killed and stopped in turn, under load.

A relay before each server keeps what it was asked and what it said. So each answer is put together again from what the
members said, and compared with what its client had.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Event, Lock
from typing import Any, NamedTuple

import httpx
import msgspec
import openai
import pytest

from adapters.contract import silent
from adapters.model_source import resolve
from adapters.model_store import ModelStore
from adapters.own_tokenizer import TokenizerRecipe
from adapters.tokenizer import Tokenizer
from orchestrator.cli.daemon_socket import query_daemon
from orchestrator.config.load import load_config
from orchestrator.fitting.worker_options import engine_options, worker_specs
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.worker.loading.engine import build_loop
from orchestrator.worker.loading.models import load_target
from policies.sampling import Sampling
from tests.support.daemon import Daemon, running
from tests.support.llama_server import LlamaServer, running_llama_server
from tests.support.recording_relay import RecordingRelay
from tests.support.waiting import until

pytest.importorskip("xllamacpp")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

REQUESTS = 300
AT_ONCE = 10
TOKENS = 32
LOADED_WITHIN_S = 900.0
KINDS = ("plain", "tools", "schema", "stops")
STOPS = [".", "\n\n"]
TOPICS = ("the sea", "a clock", "two dogs", "bread", "a long road", "snow")
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["sea", "land", "sky"]}, "count": {"type": "integer"}},
    "required": ["place", "count"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "maxLength": 12}},
            "required": ["word"],
            "additionalProperties": False,
        },
    },
}


class Request(NamedTuple):
    """One of the load. Every second one with tools has to call one, which only a worker of ours can promise."""

    number: int
    kind: str

    @property
    def forced(self) -> bool:
        return self.kind == "tools" and self.number % 8 >= 4

    @property
    def body(self) -> dict[str, Any]:
        text = f"Note {self.number}. Write a story about {TOPICS[self.number % len(TOPICS)]}."
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "temperature": 0.0}
        body |= {"model": "smol", "max_completion_tokens": TOKENS}
        extra: dict[str, Any] = {}
        if self.kind in ("plain", "stops"):
            extra["ignore_eos"] = True
        if self.kind == "stops":
            body["stop"] = STOPS
        if self.kind == "tools":
            body |= {"tools": [TOOL], "tool_choice": "required" if self.forced else "auto"}
        if self.kind == "schema":
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
        return {**body, "extra_body": extra}


@dataclass
class Answer:
    """As its client had it. `marks`: the groups of its bits, each with the token that it begins at."""

    text: str = ""
    calls: str = ""
    finish: str = ""
    tokens: int = 0
    marks: list[tuple[int, str]] = field(default_factory=list)
    error: str = ""

    def find_group(self, token: int) -> str:
        return [group for start, group in self.marks if start <= token][-1]


@dataclass
class Attempt:
    """A request as a server of a group had it: behind so many `before` tokens of the answer it made `tokens`, of which
    the `text` is whole. `exact`: it gave the id of each."""

    group: str
    before: list[int]
    tokens: list[int]
    count: int
    text: str
    read: int

    @property
    def exact(self) -> bool:
        return self.count == len(self.tokens)


class OwnMember:
    """The worker of ours in this process: what it says behind given tokens. Those of an answer are no prompt's: their
    rows are computed one by one, as they were."""

    def __init__(self, config: Path) -> None:
        loaded = load_config(config)
        spec = worker_specs(engine_options(loaded, config.parent), loaded)[0]
        options = msgspec.convert(spec.options, EngineOptions)
        self._loop = build_loop(load_target(options, silent), options, None)
        self._using = Lock()

    def decode(self, prompt: list[int], before: list[int]) -> list[int]:
        """Return a plain answer's tokens."""
        tokens = list(before)
        with self._using:
            if len(before) < TOKENS:
                submit = Submit("own", prompt, TOKENS, committed=before, sampling=Sampling(0.0))
                assert self._loop.submit(submit) is None
            while not self._loop.idle:
                tokens += [token for delta in self._loop.run_round().deltas for token in delta.tokens]
        return tokens


@dataclass
class Pool:
    """The daemon, its configuration, its servers in the order of the replicas behind the first, and the relay before
    each."""

    daemon: Daemon
    config: Path
    servers: list[LlamaServer]
    relays: list[RecordingRelay]
    tokenizer: Tokenizer
    names: list[str]
    groups: list[str]

    def replica(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = self.daemon.status()["replicas"][number]
        return found

    def phases(self) -> list[str]:
        return [replica["phase"] for replica in self.daemon.status()["replicas"]]


@pytest.fixture
def pool(tmp_path: Path, default_model_path: Path, shared_store: Path) -> Iterator[Pool]:
    with ExitStack() as stack:
        servers, relays = [], []
        for name in ("one", "two"):
            (directory := tmp_path / name).mkdir()
            servers.append(stack.enter_context(running_llama_server(default_model_path, directory)))
            relays.append(stack.enter_context(RecordingRelay(servers[-1].port)))
        endpoints = ", ".join(f"{{endpoint: 'http://127.0.0.1:{relay.port}/v1'}}" for relay in relays)
        path = tmp_path / "cluster.yaml"
        members = f"[{{max_running: 2}}, {endpoints}]"
        path.write_text(
            f"model: {{source: {default_model_path}, name: smol, adapter: openvino_rt, replicas: {members}}}\n"
            "limits: {kv_cache: 128 MiB, max_running: 4}\ndevices: {threads: 1}\nfailover: {after_s: 0.5}\n"
            f"api: {{port: 0, admin_socket: '{tmp_path}/admin.sock'}}\nstore: {{directory: '{shared_store}'}}\n"
            f"state: {{directory: '{tmp_path}/state'}}\nlogging: {{format: json}}\ndrafts: []\n",
            encoding="utf-8",
        )
        daemon = stack.enter_context(running(path))
        until(lambda: [one["phase"] for one in daemon.status()["replicas"]] == ["ready"] * 3, LOADED_WITHIN_S)
        file = resolve(str(default_model_path), Path())
        prepared = ModelStore(shared_store).prepare(file, TokenizerRecipe(), silent)
        tokenizer = Tokenizer.load(prepared)
        replicas = daemon.status()["replicas"]
        pool = Pool(daemon, path, servers, relays, tokenizer, [one["name"] for one in replicas], [])
        pool.groups.extend(ask_fingerprint(pool, number) for number in range(3))
        yield pool


def ask_fingerprint(pool: Pool, number: int) -> str:
    """Return what a replica's answers say of their bits."""
    for name in pool.names:
        hold(pool, name, "cordoned" if name != pool.names[number] else "")
    body: dict[str, Any] = {"model": "smol", "prompt": "So", "max_tokens": 1}
    fingerprint = pool.daemon.client.completions.create(**body).system_fingerprint
    for name in pool.names:
        hold(pool, name, "")
    assert fingerprint is not None
    return fingerprint


def hold(pool: Pool, name: str, state: str) -> None:
    query_daemon(pool.daemon.admin, "/admin/hold", {"kind": "worker", "name": name, "state": state})


def send(pool: Pool, request: Request, **extra: Any) -> Answer:
    """Return what a client without retries gets; every fourth one asks for a whole answer."""
    body = request.body
    body["extra_body"] |= extra
    try:
        if request.number // 4 % 4 == 3 or extra:
            return read_whole(pool.daemon.client.chat.completions.create(**body))
        return read_stream(pool.daemon, body)
    except openai.APIError as error:
        return Answer(error=str(error))


def read_whole(whole: Any) -> Answer:
    message, usage = whole.choices[0].message, whole.usage
    answer = Answer(message.content or "", "", whole.choices[0].finish_reason, usage.completion_tokens)
    answer.calls = "".join(call.function.name + call.function.arguments for call in message.tool_calls or ())
    answer.marks = [(mark["from_token"], mark["system_fingerprint"]) for mark in list_changes(usage)]
    answer.marks.insert(0, (0, whole.system_fingerprint))
    if len(answer.marks) > 1:  # a whole answer's own fingerprint is that of its end
        answer.marks[0] = (0, "")
    return answer


def list_changes(usage: Any) -> list[dict[str, Any]]:
    changes: list[dict[str, Any]] = (usage.model_extra or {}).get("system_fingerprints", [])
    return changes


def read_stream(daemon: Daemon, body: dict[str, Any]) -> Answer:
    answer, prints = Answer(), list[str]()
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in daemon.client.chat.completions.create(**body, **options):
        if chunk.system_fingerprint not in prints[-1:]:
            prints.append(chunk.system_fingerprint)
        for choice in chunk.choices:
            answer.text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                answer.calls += (call.function.name or "") + (call.function.arguments or "")
            answer.finish = choice.finish_reason or answer.finish
        if chunk.usage is not None:
            answer.tokens = chunk.usage.completion_tokens
            changes = [(mark["from_token"], mark["system_fingerprint"]) for mark in list_changes(chunk.usage)]
            answer.marks = [(0, prints[0]), *changes]
    assert [group for _, group in answer.marks] == prints, "each chunk says what `usage` says of the whole"
    return answer


def strike(pool: Pool, number: int, signal_number: int) -> None:
    """Send a member a signal while it decodes two streams, and wait until it was gone and all serve again."""
    others = [name for name in pool.names if name != pool.names[number]]
    for name in others:
        hold(pool, name, "cordoned")
    made = pool.replica(number)["totals"]["generated"]
    until(lambda: pool.replica(number)["streams"] >= 2 and pool.replica(number)["totals"]["generated"] > made + 8)
    for name in others:
        hold(pool, name, "")
    before = pool.replica(number)
    server = pool.servers[number - 1] if number else None
    if server is not None:
        server.send_signal(signal_number)
    else:
        os.kill(before["ready"]["pid"], signal_number)
    pid = before["ready"]["pid"]
    until(lambda: pool.replica(number)["phase"] != "ready" or pool.replica(number)["ready"]["pid"] != pid)
    if server is not None:
        server.send_signal(signal.SIGCONT) if signal_number == signal.SIGSTOP else server.start()
    until(lambda: pool.phases() == ["ready"] * 3)


def list_attempts(pool: Pool, prompt: list[int]) -> list[Attempt]:
    """Return what the servers were asked for a request, those with the fewest tokens first."""
    attempts = []
    for relay, group in zip(pool.relays, pool.groups[1:], strict=True):
        for exchange in list(relay.exchanges):
            prompt_sent = exchange.body.get("prompt")
            if (
                exchange.path != "/completion"
                or not isinstance(prompt_sent, list)
                or prompt_sent[: len(prompt)] != prompt
            ):
                continue
            events = exchange.read_events()
            tokens = [token for event in events for token in event.get("tokens") or ()]
            counts = [event.get("tokens_predicted", 0) for event in events]
            text = "".join(event.get("content", "") for event in events)
            read = next(
                (event["tokens_evaluated"] for event in events if "tokens_evaluated" in event), len(prompt_sent)
            )
            assert read == len(prompt_sent), "the engine read as many tokens as were sent"
            attempts.append(Attempt(group, prompt_sent[len(prompt) :], tokens, max(counts, default=0), text, read))
    return sorted(attempts, key=lambda attempt: len(attempt.before))


def check_chain(answer: Answer, attempts: list[Attempt]) -> int:
    """See that each attempt goes on from what was said before it, and that what it said has its mark; returns how
    many of them the answer has tokens of."""
    used = 0
    for attempt, then in pairwise([*attempts, None]):
        assert attempt is not None
        start = len(attempt.before)
        end = len(then.before) if then is not None else answer.tokens
        if not attempt.count or end <= start:
            continue  # it came to nothing
        theirs = [group for begin, group in answer.marks if start < begin < end]
        count_told = end - start if not theirs else next(b for b, group in answer.marks if b > start) - start
        assert answer.find_group(start) in (attempt.group, ""), "an answer's bits are of a group that it does not name"
        assert count_told <= attempt.count, "a token came from nowhere"
        used += 1
        if then is not None:
            assert then.before[:start] == attempt.before, "what was said is said again"
            if attempt.exact:
                assert then.before[start : start + count_told] == attempt.tokens[:count_told], (
                    "a token was lost or came twice"
                )
    return used


def check_text(
    pool: Pool, own: OwnMember, request: Request, prompt: list[int], answer: Answer, attempts: list[Attempt]
) -> None:
    """See that a client's text is what the members said, to its end."""
    before: list[int] = attempts[-1].before if attempts else []
    last_begin, last_group = answer.marks[-1]
    text = pool.tokenizer.decode(before)
    if attempts and attempts[-1].count and last_begin <= len(before) and last_group in (attempts[-1].group, ""):
        text += attempts[-1].text
    elif request.kind in ("plain", "stops"):
        tokens_told = (before + attempts[-1].tokens)[:last_begin] if attempts else before
        text = pool.tokenizer.decode(own.decode(prompt, tokens_told))
    else:
        text = answer.text  # a grammar that has begun has no other way to be asked for
    for stop in STOPS if request.kind == "stops" else ():
        text = text.partition(stop)[0]
    assert answer.text == text.rstrip("\ufffd") or answer.text == text


def check_answer(pool: Pool, own: OwnMember, request: Request, answer: Answer) -> int:
    """See that an answer is what the members said; returns how often a server's tokens are in it."""
    body = request.body
    chat = {name: body[name] for name in ("model", "messages", "tools") if name in body}
    prompt = httpx.post(f"{pool.daemon.url}/tokenize", json=chat).raise_for_status().json()["tokens"]
    attempts = list_attempts(pool, prompt)
    used = check_chain(answer, attempts)
    check_text(pool, own, request, prompt, answer, attempts)
    if request.kind == "plain":
        assert (answer.tokens, answer.finish) == (TOKENS, "length")
    if request.kind == "schema" and answer.finish == "stop":
        assert json.loads(answer.text)["place"] in ("sea", "land", "sky")
    if not attempts:  # one of ours alone: a plain one is compared above
        assert {group for _, group in answer.marks} == {pool.groups[0]}
    if not attempts and request.kind in ("tools", "schema"):
        again = send(pool, request, system_fingerprint=pool.groups[0])
        assert (answer.text, answer.calls, answer.tokens) == (again.text, again.calls, again.tokens)
    return used


def test_no_token_is_lost_or_doubled_whichever_member_is_lost(pool: Pool) -> None:
    requests = [Request(number, KINDS[number % len(KINDS)]) for number in range(REQUESTS)]
    faults = [(number, how) for how in (signal.SIGKILL, signal.SIGSTOP) for number in range(3)]
    turns = [Event() for _ in faults]  # each fault strikes its own share of the requests

    def send_in_turn(request: Request) -> Answer:
        turns[request.number * len(faults) // REQUESTS].wait()
        return send(pool, request)

    with ThreadPoolExecutor(AT_ONCE) as clients:
        sent = [clients.submit(send_in_turn, request) for request in requests]
        try:
            for turn, fault in zip(turns, faults, strict=True):
                turn.set()
                strike(pool, *fault)
        finally:
            for turn in turns:
                turn.set()
        answers = [one.result() for one in sent]
    figures = {
        "requests": len(answers),
        "client_errors": sum(bool(answer.error) for answer in answers),
        "changed_group": sum(max(0, len(answer.marks) - 1) for answer in answers),
        "by_group": dict(Counter(answer.marks[-1][1] for answer in answers if answer.marks)),
        "told_changes": sum(pool.daemon.status()["changed_groups"].values()),
    }
    assert [answer.error for answer in answers if answer.error] == []
    wrong: list[str] = []
    own = OwnMember(pool.config)
    with ThreadPoolExecutor(4) as checking:

        def check(pair: tuple[Request, Answer]) -> int:
            try:
                return check_answer(pool, own, *pair)
            except AssertionError as error:
                wrong.append(f"{pair[0]}: {error}; {pair[1]}")
                return 0

        used = list(checking.map(check, zip(requests, answers, strict=True)))
    figures |= {"with_tokens_of_servers": sum(map(bool, used)), "wrong": len(wrong)}
    log = logging.getLogger(__name__)
    log.warning("%s", json.dumps(figures))  # pytest --log-cli-level=WARNING
    for told in wrong:
        log.warning("%s", told)
    assert wrong == []
    assert figures["changed_group"] == figures["told_changes"]
    assert httpx.get(f"{pool.daemon.url}/ready").status_code == httpx.codes.OK
