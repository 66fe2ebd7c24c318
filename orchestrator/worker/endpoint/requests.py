"""The requests that an endpoint's server has: what is sent of each, what came of it, and what is told of both."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from adapters.tokenizer import Tokenizer
from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import Delta, Refused, RequestStats
from orchestrator.worker.endpoint.client import (
    EndpointClient,
    RequestRefused,
    ServerAway,
    ServerBusy,
    StreamLost,
    TooLong,
)
from orchestrator.worker.endpoint.detection import ServerFacts
from orchestrator.worker.endpoint.dialects import LLAMA_SERVER, Chunk, WireRequest
from orchestrator.worker.endpoint.token_readers import ExactReader, GapReader, PieceIndex, TextReader, TokenReader

_MOST_TRIES: Final = 3
"""Of a request that gets no further, at a server that works."""
_MOST_BUSY: Final = 8
"""So often in a row a server may say that it is busy: then another may have the request."""
# Not tuned: a slot of a busy server is free after a few of its answers.
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.25, 4.0


@dataclass(slots=True, eq=False)
class RemoteRequest:
    """One request. Times are seconds of the worker's clock. `tokens`: of the answer, those that it came with among
    them. `sent_s`: when the server had it last; `heard_s`: when it last said something of it; 0: not yet."""

    submit: Submit
    arrived_s: float
    tokens: list[int]
    admitted_s: float = 0.0
    first_s: float = 0.0
    sent_s: float = 0.0
    heard_s: float = 0.0
    steps: int = 0
    cached: int = 0
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def length(self) -> int:
        """Tokens of its prompt and of its answer so far."""
        return len(self.submit.prompt) + len(self.tokens)

    def cancel(self) -> None:
        """End it, there too."""
        if self.task is not None:
            self.task.cancel()

    def append_tokens(self, tokens: list[int], finish: str) -> tuple[list[int], str]:
        """Append tokens up to the first that ends the answer, or to the limit; return them and why it ended ("" if
        not)."""
        taken: list[int] = []
        for token in tokens:
            taken.append(token)
            if token in self.submit.stop_tokens and len(self.tokens) + len(taken) > self.submit.min_tokens:
                finish = "stop"
                break
            if len(self.tokens) + len(taken) >= self.submit.max_tokens:
                finish = "length"
                break
        self.tokens.extend(taken)
        self.steps += bool(taken)
        return taken, finish

    def make_delta(self, tokens: list[int], finish: str) -> Delta:
        stats = RequestStats(
            prompt_tokens=len(self.submit.prompt),
            generated=len(self.tokens),
            steps=self.steps,
            drafted=0,
            accepted=0,
            queue_ms=max(0.0, self.admitted_s - self.arrived_s) * MS_PER_S,
            prefill_ms=max(0.0, self.first_s - self.admitted_s) * MS_PER_S,
            reused=self.cached,
        )
        return Delta(self.submit.request_id, tokens, finish, stats)


def ignores_eos(submit: Submit, tokenizer: Tokenizer) -> bool:
    """Return whether the model's own end is none to a request."""
    return not tokenizer.eos_ids & set(submit.stop_tokens)


class RequestRunner:
    """Gets one answer after the other from a server. `tell`: takes tokens of a request, and why it ended ("").
    `is_alive`: asks whether the server works."""

    def __init__(
        self,
        client: EndpointClient,
        facts: ServerFacts,
        tokenizer: Tokenizer,
        clock: Clock,
        context_tokens: int,
        tell: Callable[[RemoteRequest, list[int], str], None],
        is_alive: Callable[[], Awaitable[bool]],
    ) -> None:
        self._client = client
        self._facts = facts
        self._tokenizer = tokenizer
        self._clock = clock
        self._context_tokens = context_tokens
        self._tell = tell
        self._is_alive = is_alive
        self._pieces = PieceIndex(tokenizer)

    def find_refusal(self, submit: Submit) -> Refused | None:
        """Return why a request can never be served here; None where it can."""
        key, tokenizer = submit.request_id, self._tokenizer
        if "ignore_eos" in self._facts.dialect.cannot and ignores_eos(submit, tokenizer):
            return Refused(key, f"{self._facts.title} ends at the model's own end", "elsewhere")
        known = [*submit.prompt, *submit.committed]
        problem = ""
        if not submit.prompt:
            problem = "the prompt is empty"
        elif submit.max_tokens < 0 or len(submit.committed) >= max(1, submit.max_tokens):
            problem = f"max_tokens {submit.max_tokens} leaves nothing to generate"
        elif min(known) < 0 or max(known) >= tokenizer.vocabulary_size:
            problem = f"a token is outside the vocabulary of {tokenizer.vocabulary_size}"
        if problem:
            return Refused(key, problem, "invalid")
        longest = len(submit.prompt) + submit.max_tokens
        if longest <= self._context_tokens:
            return None
        return Refused(key, f"prompt and max_tokens make {longest} tokens", "too_long", self._context_tokens)

    async def run(self, request: RemoteRequest) -> Refused | None:
        """Get an answer to its end, whatever breaks in between; returns why that cannot be. Raises ServerAway where the
        server does not work, and KeyRefused."""
        request_id, tries, busy, backoff_s = request.submit.request_id, 0, 0, _FIRST_BACKOFF_S
        while True:
            length = request.length
            try:
                await self._read_answer(request)
                return None
            except TooLong as error:
                return Refused(request_id, str(error), "too_long", most_tokens=self._context_tokens)
            except RequestRefused as error:
                return Refused(request_id, f"{self._client.url} does not take the request: {error}", "invalid")
            except ServerBusy as error:  # it says so before it has done anything
                busy += 1
                if busy > _MOST_BUSY:
                    return Refused(request_id, f"{self._client.url} is busy: {error}", "elsewhere")
            except (StreamLost, ServerAway) as error:
                if not await self._is_alive():
                    raise ServerAway(str(error)) from error
                tries = tries + 1 if request.length == length else 1
                if tries > _MOST_TRIES:
                    return Refused(request_id, f"{self._client.url} failed {tries} times on it: {error}", "elsewhere")
            backoff_s = _FIRST_BACKOFF_S if request.length > length else min(_LONGEST_BACKOFF_S, backoff_s * 2.0)
            request.sent_s = 0.0
            await asyncio.sleep(backoff_s)

    async def _read_answer(self, request: RemoteRequest) -> None:
        facts, reader = self._facts, self._make_reader()
        body = facts.dialect.build(self._translate(request), facts.model)
        request.sent_s = request.heard_s = self._clock.monotonic_s()
        async with aclosing(self._client.stream_lines(facts.path, body)) as lines:
            async for line in lines:
                request.heard_s = self._clock.monotonic_s()
                chunk = facts.dialect.read_line(line)
                if chunk is not None and self._take(request, reader, chunk):
                    return
        raise StreamLost("the answer ended before its end")

    def _take(self, request: RemoteRequest, reader: TokenReader, chunk: Chunk) -> bool:
        """Take in a chunk; returns whether the answer is over."""
        request.cached = max(request.cached, chunk.cached_tokens)
        if not all(0 <= token < self._tokenizer.vocabulary_size for token in chunk.tokens or ()):
            raise StreamLost(f"it gave ids outside the vocabulary: {list(chunk.tokens or ())[:8]}")
        taken, finish = request.append_tokens(reader.read(chunk), chunk.finish)
        if taken or finish:
            if not request.first_s:
                request.first_s = request.heard_s
            self._tell(request, taken, finish)
        return bool(finish)

    def _make_reader(self) -> TokenReader:
        if not self._facts.gives_ids:
            return TextReader(self._tokenizer)
        if self._facts.dialect.engine == LLAMA_SERVER:
            return GapReader(self._tokenizer, self._pieces)
        return ExactReader()

    def _translate(self, request: RemoteRequest) -> WireRequest:
        submit = request.submit
        ids = [*submit.prompt, *request.tokens]
        tokenizer, done = self._tokenizer, len(request.tokens)
        ignore_eos = ignores_eos(submit, tokenizer)
        prompt = ids if self._facts.takes_ids else self._write_prompt(ids)
        return WireRequest(submit, prompt, submit.max_tokens - done, done, ignore_eos)

    def _write_prompt(self, ids: list[int]) -> str:
        """Return the text of ids, without the token that the engine puts before every text."""
        begins = ids[:1] == [self._tokenizer.bos_id]
        return self._tokenizer.decode(ids[begins:], skip_special=False)
