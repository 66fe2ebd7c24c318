"""What is asked of a llama-server, and its answers, checked."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import httpx
import msgspec

from adapters.framing import ProtocolError
from device_profiles.units import MS_PER_S
from orchestrator.protocol.links.endpoint import GREETING_S, LinkLost

_IDLE_S = 4.0  # the server closes a connection that was idle for 5 s
_NO_ROOM = "context size"  # in what it says where one sequence, or all together, are too long
_T = TypeVar("_T")


class Refused(Exception):
    """The server answered that it does not do this; `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class SequenceTooLong(Refused):
    """The server's context does not hold the sequence."""


class Completion(msgspec.Struct, frozen=True):
    """Tokens that go on behind a prompt, and how sure the model is of each. `evaluated` tokens of the prompt were read
    for it, the others were kept. The server took `took_ms`, and its way `way_ms`."""

    tokens: tuple[int, ...]
    confidences: tuple[float, ...]
    evaluated: int
    took_ms: float
    way_ms: float


class ServerProps(msgspec.Struct, frozen=True):
    """What a server says of itself, of all that it says."""

    total_slots: int
    model_path: str = ""
    model_alias: str = ""
    model_ftype: str = ""
    build_info: str = ""

    @property
    def model(self) -> str:
        """Its model's name, without the directory."""
        return (self.model_alias or self.model_path).replace("\\", "/").rsplit("/", 1)[-1]


class TokenPiece(msgspec.Struct, frozen=True):
    """A token id and what it stands for there: text, or bytes where these are no UTF-8."""

    id: int
    piece: str | list[Annotated[int, msgspec.Meta(ge=0, le=255)]]

    @property
    def spelling(self) -> bytes:
        return self.piece.encode() if isinstance(self.piece, str) else bytes(self.piece)


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[TokenPiece]


class _Meta(msgspec.Struct, frozen=True):
    n_vocab: int = 0


class _Model(msgspec.Struct, frozen=True):
    meta: _Meta | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model] = []


class _Timings(msgspec.Struct, frozen=True):
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_ms: float = 0.0


class _Chance(msgspec.Struct, frozen=True):
    id: int
    logprob: float | None


class _Answer(msgspec.Struct, frozen=True):
    tokens: tuple[int, ...]
    timings: _Timings
    completion_probabilities: list[_Chance] = []


class LlamaServerClient:
    """Connections to one server, kept open. Threads may share it. A draft may take `timeout_s`; `key` is the
    server's API key ("": it wants none)."""

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_S),
            trust_env=False,  # a proxy on the way would cost more than drafts are worth
            verify=httpx.create_ssl_context(),  # which reads SSL_CERT_FILE, as of an authority of one's own
        )
        self._url, self._timeout_s = url, timeout_s
        self.sent_bytes = self.received_bytes = 0

    def read_props(self) -> ServerProps:
        """Ask what the server is. Raises LinkLost, ProtocolError, Refused."""
        return self._ask("GET", "/props", None, ServerProps)

    def read_vocabulary_size(self) -> int:
        """Ask how many tokens its model has. Raises LinkLost, ProtocolError, Refused."""
        models = self._ask("GET", "/v1/models", None, _Models)
        sizes = [model.meta.n_vocab for model in models.data if model.meta is not None]
        if not sizes or sizes[0] <= 0:
            raise ProtocolError("it does not say how large its vocabulary is (/v1/models)")
        return sizes[0]

    def tokenize(self, text: str) -> list[TokenPiece]:
        """Return what a text is there, with control tokens. Raises LinkLost, ProtocolError, Refused."""
        body = {"content": text, "with_pieces": True, "add_special": False, "parse_special": True}
        return self._ask("POST", "/tokenize", body, _Tokens).tokens

    def measure_way(self) -> float:
        """Return what the way there and back takes, in ms. Raises LinkLost, ProtocolError, Refused."""
        started_s = time.perf_counter()
        self._ask("GET", "/health", None, dict[str, Any])
        return (time.perf_counter() - started_s) * MS_PER_S

    def complete(self, prompt: Sequence[int], count: int) -> Completion:
        """Return the `count` likeliest tokens behind a prompt, one after another; fewer where the text ends.

        The server keeps what it computed of the prompt, and finds it again by itself: naming a slot makes it forget the
        others' where they share memory. Raises LinkLost, ProtocolError, Refused.
        """
        body = {
            "prompt": list(prompt),
            "n_predict": count,
            "cache_prompt": True,
            "stream": False,  # a stream leaves out the ids of characters that are several tokens
            "return_tokens": True,
            "temperature": 0.0,
            "samplers": ["top_k"],
            "top_k": 1,
            "n_probs": 1,
            "response_fields": ["tokens", "timings", "completion_probabilities"],
        }
        started_s = time.perf_counter()
        answer = self._ask("POST", "/completion", body, _Answer, self._timeout_s)
        passed_ms = (time.perf_counter() - started_s) * MS_PER_S
        if len(answer.tokens) > count:
            raise ProtocolError(f"{len(answer.tokens)} tokens came; {count} were asked for")
        timings = answer.timings
        took_ms = min(passed_ms, max(0.0, timings.prompt_ms + timings.predicted_ms))
        confidences = _align(answer.tokens, answer.completion_probabilities)
        return Completion(answer.tokens, confidences, timings.prompt_n, took_ms, passed_ms - took_ms)

    def close(self) -> None:
        self._http.close()

    def _ask(self, method: str, path: str, body: object, kind: type[_T], within_s: float = GREETING_S) -> _T:
        content = None if body is None else msgspec.json.encode(body)
        response = self._send(method, path, content, within_s)
        self.sent_bytes += len(content or b"")
        self.received_bytes += len(response.content)
        if response.status_code != httpx.codes.OK:
            raise _explain(response)
        try:
            return msgspec.json.decode(response.content, type=kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ProtocolError(f"its answer to {path} makes no sense: {error}") from error

    def _send(self, method: str, path: str, content: bytes | None, within_s: float) -> httpx.Response:
        """A server also closes a connection after so many requests, perhaps while the next one is on its way. That of a
        kept one says nothing of the server, and every other that was kept may be closed by now: a new one is asked."""
        headers = {} if content is None else {"Content-Type": "application/json"}
        opened = False

        def note(event: str, _details: object) -> None:
            nonlocal opened
            opened = opened or event == "connection.connect_tcp.started"

        while True:
            try:
                return self._http.request(
                    *(method, path), content=content, headers=headers, timeout=within_s, extensions={"trace": note}
                )
            except httpx.TimeoutException as error:
                raise LinkLost(f"{self._url} does not answer") from error
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
                if opened:
                    raise LinkLost(f"{self._url} closed the connection ({error})") from error
            except (httpx.HTTPError, httpx.InvalidURL, OSError, RuntimeError) as error:  # closed by another thread
                raise LinkLost(f"{self._url}: {error}") from error


def _explain(response: httpx.Response) -> Exception:
    """Return what an answer that is none is raised as."""
    try:
        error = msgspec.json.decode(response.content)["error"]
        message = str(error["message"])
    except (msgspec.MsgspecError, RecursionError, TypeError, KeyError):
        message = f"HTTP {response.status_code}"
    if _NO_ROOM in message.casefold():
        return SequenceTooLong(response.status_code, message)
    if response.is_server_error:
        return LinkLost(message)
    return Refused(response.status_code, message)


def _align(tokens: Sequence[int], chances: Sequence[_Chance]) -> tuple[float, ...]:
    """Return how sure each token is. The server tells of a character's last token alone: it stands for all of them."""
    confidences: list[float] = []
    waiting = iter(chances)
    chance = next(waiting, None)
    for token in tokens:
        confidences.append(1.0 if chance is None else _probability(chance))
        if chance is not None and chance.id == token:
            chance = next(waiting, None)
    return tuple(confidences)


def _probability(chance: _Chance) -> float:
    return 0.0 if chance.logprob is None else math.exp(min(0.0, chance.logprob))
