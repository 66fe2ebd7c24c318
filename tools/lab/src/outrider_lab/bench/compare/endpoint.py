"""Servers as engines of a comparison: any OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from adapters.tokenizer import load_tokenizer
from outrider_lab.bench.compare.process import EngineFailed
from outrider_lab.bench.traffic.client import Endpoint, EndpointKind, open_client, send_request
from outrider_lab.bench.traffic.outcome import Outcome
from outrider_lab.peers.contract import Answer, EngineMissing, NotOffered, PeerEngine, PeerPrompt, Score

_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """Where a server is. `url` is the API's base (".../v1"), `tokenizer` the prepared one that texts are encoded with.
    `body` goes into every request."""

    url: str
    model: str
    tokenizer: str
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    at_once: int = 1


def load(options: EndpointOptions) -> EndpointEngine:
    """Return a server as an engine. Raises EngineMissing where none answers."""
    return EndpointEngine(options)


class EndpointEngine(PeerEngine):
    """A server, asked for completions of tokens, or, where it takes none, for chat completions of the text."""

    def __init__(self, options: EndpointOptions) -> None:
        """Take a server that answers. Raises EngineMissing where none does."""
        self._options = options
        self._tokenizer = load_tokenizer(options.tokenizer)
        try:
            response = httpx.get(f"{options.url}/models", headers=options.headers, timeout=10.0)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineMissing(f"no server answers at {options.url} ({error}): start one, or leave it out") from error
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise EngineMissing(f"{options.url} refuses the key ({response.status_code}): give --api-key")
        self._model = options.model
        with suppress(httpx.HTTPStatusError, ValueError, KeyError, IndexError, TypeError):
            self._model = self._model or str(response.raise_for_status().json()["data"][0]["id"])
        self._told = response.headers.get("server", "")
        self._takes_tokens = self._check_tokens()

    def describe(self) -> dict[str, str]:
        """See PeerEngine: what a client can know."""
        hidden = "not told by the endpoint"
        asked = "completions of tokens" if self._takes_tokens else "chat completions of the text, by its own template"
        return {
            "version": self._told or hidden,
            "weights": f"{self._model}: {hidden}",
            "activations": hidden,
            "kv_cache": hidden,
            "threads": hidden,
            "asked": asked,
        }

    def generate(self, prompt: PeerPrompt, max_tokens: int) -> Answer:
        return self.generate_many([prompt], max_tokens)[0]

    def generate_many(self, prompts: Sequence[PeerPrompt], max_tokens: int) -> list[Answer]:
        """See PeerEngine: `at_once` requests are on the way together. Raises EngineFailed."""
        began_s, outcomes = asyncio.run(self._send(prompts, max_tokens))
        for outcome in outcomes:
            if outcome.error:
                raise EngineFailed(f"{self._options.url}: {outcome.error}: {outcome.message}")
        return [self._answer(outcome, began_s) for outcome in outcomes]

    def score(self, tokens: Sequence[int]) -> Score:
        """See PeerEngine: by `echo` with `logprobs`, which vLLM and others answer."""
        body = {"model": self._model, "prompt": list(tokens), "max_tokens": 1, "echo": True, "logprobs": 1}
        response = self._post({**body, "temperature": 0.0})
        told: list[Any] = []
        with suppress(ValueError, KeyError, IndexError, TypeError):
            told = response.raise_for_status().json()["choices"][0]["logprobs"]["token_logprobs"][1 : len(tokens)]
        if len(told) != len(tokens) - 1 or any(not isinstance(one, (int, float)) for one in told):
            raise NotOffered("the endpoint tells no log-probabilities of a prompt (`echo` with `logprobs`)")
        return Score([float(one) for one in told])

    def _check_tokens(self) -> bool:
        body = {"model": self._model, "prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0.0, **self._options.body}
        try:
            return self._post(body).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def _post(self, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(
            f"{self._options.url}/completions", json=body, headers=self._options.headers, timeout=_TIMEOUT_S
        )

    async def _send(self, prompts: Sequence[PeerPrompt], max_tokens: int) -> tuple[float, list[Outcome]]:
        """Return when the first request was sent, and what came of all: opening a client takes a while itself."""
        options = self._options
        kind: EndpointKind = "completions" if self._takes_tokens else "chat"
        endpoint = Endpoint(options.url, self._model, kind, options.headers, options.body)
        places = asyncio.Semaphore(options.at_once)

        async def ask(number: int, prompt: PeerPrompt) -> Outcome:
            fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0}
            if self._takes_tokens:
                fields["prompt"] = prompt.tokens
            outcome = Outcome(str(number), "")
            async with places:
                payload = endpoint.payload(prompt.text, fields)
                await send_request(client, endpoint, payload, outcome, _TIMEOUT_S, time.perf_counter)
            return outcome

        async with open_client() as client:
            began_s = time.perf_counter()
            return began_s, await asyncio.gather(*(ask(number, prompt) for number, prompt in enumerate(prompts)))

    def _answer(self, outcome: Outcome, began_s: float) -> Answer:
        tokens = self._tokenizer.encode(outcome.text, special=False)
        first_s = (outcome.chunks_s[0] if outcome.chunks_s else outcome.last_s) - began_s
        told = (outcome.steps, outcome.drafted, outcome.accepted)
        return Answer(tokens, first_s, outcome.last_s - began_s, *told, count=outcome.generated)


def parse_endpoint(text: str) -> tuple[str, str]:
    """Return the parts of NAME=URL. Raises ValueError saying what is wrong."""
    name, _, url = text.partition("=")
    if not name or not url.startswith(("http://", "https://")):
        raise ValueError(f"write NAME=URL with the API's base, as vllm=http://127.0.0.1:8001/v1, not {text!r}")
    return name, url.rstrip("/")
