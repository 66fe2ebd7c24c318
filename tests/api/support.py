"""The API over a scripted control: what it is asked and when it is let go can be seen, and it fails on demand."""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from openai import AsyncOpenAI

from adapters.tokenizer import Tokenizer
from orchestrator.clock import Clock, SystemClock
from orchestrator.config.model import Api, Limits
from orchestrator.daemon.api.app import create_app
from orchestrator.daemon.api.served import ServedTarget, TargetTerms
from orchestrator.daemon.api.settings import ApiSettings
from orchestrator.daemon.control.operator_desk import OperatorDesk
from orchestrator.daemon.control.port import DeviceView, DraftView, ReplicaView, RouteView, StateView, Totals
from orchestrator.daemon.control.step import State
from orchestrator.daemon.journal.book import AnswerBook
from orchestrator.daemon.sandbox.sandbox import Sandbox
from orchestrator.errors import RequestError
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Delta, Gauges, RequestStats
from policies.serving.failover.health import Held, PartKind
from policies.serving.overrides import EffectiveBound, Override
from tests.support.drafters import FINGERPRINT
from tests.support.ready import PLAIN, change_ready

TERMS = {field.name for field in dataclasses.fields(TargetTerms)}
CONTEXT_TOKENS = 64
EOS = 256
WITHIN_S = 60.0  # a machine that stands still is waited for
TOKENIZER = Tokenizer.bytes_only()
_SANDBOX = Sandbox()  # of all apps: a process of its own takes a while to start
atexit.register(_SANDBOX.close)
READY = change_ready(
    PLAIN,
    vocabulary_size=TOKENIZER.vocabulary_size,
    vocabulary_fingerprint=FINGERPRINT,
    context_tokens=CONTEXT_TOKENS,
    kv_blocks=8,
    block_tokens=16,
    max_depth=4,
)


class HandClock:
    """Time that moves when the test says so."""

    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s


class _ScriptedDesk(OperatorDesk):
    """Passes on to the script what that is asked in its place; of all else there is nothing."""

    def __init__(self, script: ScriptedControl) -> None:
        super().__init__(State(0), lambda event: None, SystemClock())
        self._script = script

    def override(self, wanted: Override | None, asked_by: str, *, user: str = "", engine: int | None = None) -> None:
        self._script.override(wanted, asked_by, user=user, engine=engine)

    def hold(self, kind: PartKind, name: str, held: Held) -> None:
        self._script.hold(kind, name, held)

    def explain(self, request_id: str) -> list[RouteView]:
        return self._script.explain(request_id)


@dataclass
class ScriptedControl:
    """Answers every request with `steps` (the tokens of each delta), then `finish`.

    `error` is raised before step `error_at`; `hang_at` is the step that never comes. `submits` holds what was
    asked, `hung` the ids that have come to `hang_at`, `ended` those whose iterator has run its cleanup, however it
    ended. `others`: replicas beside the first.
    """

    steps: list[list[int]] = field(default_factory=lambda: [list(b"hel"), list(b"lo")])
    finish: str = "length"
    error: Exception | None = None
    error_at: int = 0
    hang_at: int | None = None
    reused: int = 0
    tolerance_delta: float = -1.0
    speculation: EffectiveBound | None = None
    phase: str = "ready"
    ready: Ready | None = READY
    gauges: Gauges | None = None
    totals: Totals = field(default_factory=Totals)
    others: list[tuple[Ready | None, Gauges | None]] = field(default_factory=list)
    drafts: tuple[DraftView, ...] = ()
    submits: list[Submit] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    no_room: RequestError | None = None
    overridden: list[tuple[Override | None, str, str, int | None]] = field(default_factory=list)
    held: list[tuple[str, str, str]] = field(default_factory=list)
    devices: tuple[DeviceView, ...] = ()
    routes: list[RouteView] = field(default_factory=list)
    steering: OperatorDesk = field(init=False)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.steering = _ScriptedDesk(self)

    def view(self) -> StateView:
        streams = len(self.submits) - len(self.ended)
        said = (self.phase, "so says the script", "scripted")
        replicas = tuple(
            ReplicaView(engine, f"r{engine}", *said, ready, gauges, self.totals, streams)
            for engine, (ready, gauges) in enumerate([(self.ready, self.gauges), *self.others])
        )
        view = StateView(*said, "local", self.ready, self.gauges, self.totals, streams, 1.0)
        return dataclasses.replace(view, replicas=replicas, drafts=self.drafts, devices=self.devices)

    def check_room(self, coming: int = 0, wanted: int = 1) -> None:
        if self.no_room is not None:
            raise self.no_room

    def find_speculation(self, submit: Submit) -> EffectiveBound | None:
        return self.speculation

    def override(self, wanted: Override | None, asked_by: str, *, user: str = "", engine: int | None = None) -> None:
        self.overridden.append((wanted, asked_by, user, engine))

    def hold(self, kind: PartKind, name: str, held: Held) -> None:
        self.held.append((kind, name, held))

    def explain(self, request_id: str) -> list[RouteView]:
        return self.routes

    async def generate(self, submit: Submit) -> AsyncIterator[Delta]:
        self.submits.append(submit)
        self._idle.clear()
        try:
            for index, tokens in enumerate(self.steps):
                if self.error is not None and index == self.error_at:
                    raise self.error
                if index == self.hang_at:
                    self.hung.append(submit.request_id)
                    await asyncio.Event().wait()
                last = index == len(self.steps) - 1
                counts = (len(submit.prompt), 5, 4, 6, 3, 1.0, 2.0, self.reused, self.tolerance_delta)
                stats = RequestStats(*counts) if last else None
                told = None if index else self.speculation
                yield Delta(submit.request_id, tokens, self.finish if last else "", stats, speculation=told)
        finally:
            self.ended.append(submit.request_id)
            if len(self.ended) == len(self.submits):
                self._idle.set()

    async def until_all_ended(self) -> None:
        """Wait until something was asked and nothing of it is still running."""
        async with asyncio.timeout(WITHIN_S):
            await self._idle.wait()

    async def until_hung(self, requests: int) -> None:
        """Wait until so many requests have come to the step that never comes."""
        async with asyncio.timeout(WITHIN_S):
            while len(self.hung) < requests:  # noqa: ASYNC110 -- tests look from outside
                await asyncio.sleep(0.005)


def api_settings(**settings: Any) -> ApiSettings:
    """Return the settings of an API, by keys of the sections `limits` and `api`, and by its own fields."""
    settings = {"max_body": 65_536} | settings
    of_limits, of_api = (
        {name: settings.pop(name) for name in section.model_fields.keys() & settings} for section in (Limits, Api)
    )
    return ApiSettings(Limits().model_copy(update=of_limits), Api().model_copy(update=of_api), **settings)


def app_over(
    control: ScriptedControl,
    *,
    tokenizer: Tokenizer | None = TOKENIZER,
    book: AnswerBook | None = None,
    clock: Clock | None = None,
    **settings: Any,
) -> FastAPI:
    """Return the public app over a scripted control. `settings`: see `api_settings`; others are of the model."""
    terms = TargetTerms(**{name: settings.pop(name) for name in TERMS & settings.keys()})
    target = ServedTarget(control, lambda: tokenizer, lambda: "toy", terms)
    clock = SystemClock() if clock is None else clock
    return create_app([target], api_settings(**settings), clock, book=book, sandbox=_SANDBOX)


@contextmanager
def _bind_socket() -> Iterator[socket.socket]:
    with socket.socket() as tcp:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()  # whoever connects before the server runs waits for it
        yield tcp


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[str]:
    """Serve an app on a free port; gives its URL."""
    with _bind_socket() as tcp:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
        task = asyncio.create_task(server.serve(sockets=[tcp]))
        try:
            yield f"http://127.0.0.1:{tcp.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


async def leave_hanging(client: httpx.AsyncClient, path: str, body: dict[str, Any], control: ScriptedControl) -> None:
    """Ask, and go away while the answer hangs: the connection is closed."""
    request = asyncio.create_task(client.post(path, json=body))
    await control.until_hung(len(control.hung) + 1)
    request.cancel()
    await asyncio.wait({request})
    assert request.cancelled()


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[AsyncOpenAI]:
    """Serve an app and give the real client for it, which never retries."""
    async with serving(app) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        yield client
