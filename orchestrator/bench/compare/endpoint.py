"""Servers as engines of a comparison: any OpenAI-compatible endpoint, and a llama.cpp server that is started here."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from adapters.parent_process import end_with_parent
from adapters.peers.contract import Answer, EngineMissing, NotOffered, PeerPrompt, Score
from orchestrator.bench.compare.process import EngineFailed
from orchestrator.bench.traffic.client import Endpoint, EndpointKind, open_client, send_request
from orchestrator.bench.traffic.outcome import Outcome
from orchestrator.loading.models import load_tokenizer

LLAMA_SERVER = "llama-server"
LLAMA_INSTALL = "llama-server is not on PATH: install llama.cpp (https://github.com/ggml-org/llama.cpp)"
_TIMEOUT_S = 600.0
_READY_S = 180.0
_TOKENS_A_SLOT = 4096


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """Where a server is. `url` is the API's base (".../v1"), `tokenizer` the prepared one that texts are encoded with.
    `body` goes into every request. `start`: the command that starts it, where it is to be started."""

    url: str
    model: str
    tokenizer: str
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    at_once: int = 1
    start: tuple[str, ...] = ()


def load(options: EndpointOptions) -> EndpointEngine:
    """Return a server as an engine, started where it is to be. Raises EngineMissing, EngineFailed."""
    server = None
    if options.start:
        # Nothing runs between fork and exec but this, and nothing else ends a server whose client was killed.
        server = subprocess.Popen(options.start, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent)  # noqa: PLW1509
        _wait_until_ready(server, options.url)
    try:
        return EndpointEngine(options, server)
    except BaseException:
        _end(server)
        raise


def llama_options(source: Path, tokenizer: str, threads: int, at_once: int) -> EndpointOptions:
    """Return how a llama.cpp server is started for a GGUF file, on a free port. Its prompt cache is left out, so that
    no request finds an earlier one's work. Raises EngineMissing."""
    program = shutil.which(LLAMA_SERVER)
    if program is None:
        raise EngineMissing(LLAMA_INSTALL)
    if source.is_dir():
        raise EngineMissing(f"llama.cpp reads GGUF files, and {source.name} is none")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = ("-t", str(threads), "-c", str(_TOKENS_A_SLOT * at_once), "-np", str(at_once))
    command = (program, "-m", str(source), *sizes, "--host", "127.0.0.1", "--port", str(port))
    url, body = f"http://127.0.0.1:{port}/v1", {"cache_prompt": False}
    return EndpointOptions(url, source.stem, tokenizer, body=body, at_once=at_once, start=command)


class EndpointEngine:
    """A server, asked for completions of tokens, or, where it takes none, for chat completions of the text."""

    def __init__(self, options: EndpointOptions, server: subprocess.Popen[bytes] | None) -> None:
        """Take a server that answers. Raises EngineMissing where none does."""
        self._options, self._server = options, server
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
        version = _read_version() if self._server is not None else self._told or hidden
        return {
            "version": version,
            "weights": f"{self._model}: {hidden}",
            "activations": hidden,
            "kv_cache": hidden,
            "threads": hidden,
            "asked": asked,
        }

    def generate(self, prompt: PeerPrompt, max_tokens: int) -> Answer:
        """See PeerEngine."""
        return self.generate_many([prompt], max_tokens)[0]

    def generate_many(self, prompts: Sequence[PeerPrompt], max_tokens: int) -> list[Answer]:
        """See PeerEngine: `at_once` requests are on the way together. Raises EngineFailed."""
        began_s = time.perf_counter()
        outcomes = asyncio.run(self._send(prompts, max_tokens))
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

    def forget(self) -> None:
        """See PeerEngine: a server cannot be asked to."""

    def close(self) -> None:
        """See PeerEngine."""
        _end(self._server)

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

    async def _send(self, prompts: Sequence[PeerPrompt], max_tokens: int) -> list[Outcome]:
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
            return await asyncio.gather(*(ask(number, prompt) for number, prompt in enumerate(prompts)))

    def _answer(self, outcome: Outcome, began_s: float) -> Answer:
        tokens = self._tokenizer.encode(outcome.text, special=False)
        first_s = (outcome.chunks_s[0] if outcome.chunks_s else outcome.last_s) - began_s
        told = (outcome.steps, outcome.drafted, outcome.accepted)
        return Answer(tokens, first_s, outcome.last_s - began_s, *told, count=outcome.generated)


def _wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    until_s = time.monotonic() + _READY_S
    while time.monotonic() < until_s:
        if server.poll() is not None:
            raise EngineFailed(f"the server ended with exit code {server.returncode} before it was ready")
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url.removesuffix('/v1')}/health", timeout=2.0).status_code == httpx.codes.OK:
                return
        time.sleep(0.2)
    _end(server)
    raise EngineFailed(f"the server was not ready within {_READY_S:.0f} s")


def _end(server: subprocess.Popen[bytes] | None) -> None:
    if server is not None and server.poll() is None:
        server.terminate()
        try:
            server.wait(10.0)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _read_version() -> str:
    done = subprocess.run([LLAMA_SERVER, "--version"], capture_output=True, text=True, check=False)
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.startswith("version")]
    return f"llama.cpp {lines[0]}" if lines else "llama.cpp"


def parse_endpoint(text: str) -> tuple[str, str]:
    """Return the parts of NAME=URL. Raises ValueError saying what is wrong."""
    name, _, url = text.partition("=")
    if not name or not url.startswith(("http://", "https://")):
        raise ValueError(f"write NAME=URL with the API's base, as vllm=http://127.0.0.1:8001/v1, not {text!r}")
    return name, url.rstrip("/")
