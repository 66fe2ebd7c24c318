"""What a llama-server says to a drafter, over single bytes, with mistakes and faults by script."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.drafters import VOCABULARY

CONTROLS = {"<|end|>": 256, "<|start|>": 257}
_TOO_LONG = "exceed_context_size_error"
_KEPT_REQUESTS = 7  # of a connection, until it is closed


class ScriptedLlamaServer:
    """Continues `texts` (whole sequences, prompts included); every `wrong_every`-th position is another token. A token
    takes `token_ms`. What it does wrong is its `fault`, "" for nothing; `prompts` are those that it was sent,
    `most_busy` at a time. A connection is closed without a word behind `kept_requests`, and where it `drops`, only once
    another request has come."""

    def __init__(self, texts: Sequence[Sequence[int]], *, wrong_every: int = 0, token_ms: float = 0.0, slots: int = 8):
        self.texts = [list(text) for text in texts]
        self.wrong_every = wrong_every
        self.token_ms = token_ms
        self.slots = slots
        self.places = threading.Semaphore(slots)
        self.fault = ""
        self.key = ""
        self.kept_requests = _KEPT_REQUESTS
        self.drops = False
        self.prompts: list[list[int]] = []
        self.busy = self.most_busy = 0
        self.http = _Server(("127.0.0.1", 0), _build_handler(self))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return the status and the answer to a request."""
        if self.fault == "loading":
            return 503, _error(503, "Loading model", "unavailable_error")
        match path:
            case "/props":
                return 200, {"total_slots": self.slots, "model_path": "/models/bytes.gguf", "model_ftype": "F16"}
            case "/v1/models":
                return 200, {"data": [{"meta": {"n_vocab": VOCABULARY}}]}
            case "/health":
                return 200, {"status": "ok"}
            case "/tokenize":
                shift = int(self.fault == "vocabulary")
                return 200, {"tokens": [{"id": t + shift, "piece": piece} for t, piece in _split(body["content"])]}
            case "/completion":
                with self.places:  # who comes later waits, as there
                    self.busy += 1
                    self.most_busy = max(self.most_busy, self.busy)
                    answer = self._complete(body)
                    self.busy -= 1
                return answer
        return 404, _error(404, "File Not Found", "not_found_error")

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        prompt, count = body["prompt"], body["n_predict"]
        self.prompts.append(prompt)
        time.sleep(count * self.token_ms / 1000.0)
        match self.fault:
            case "outside":
                return 200, self._answer([VOCABULARY + 5] * count)
            case "many":
                return 200, self._answer([65] * (count + 1))
            case "nonsense":
                return 200, {"content": "ids are not returned here"}
            case "text":
                return 200, "no JSON"
            case "refused":
                return 401, _error(401, "Invalid API Key", "authentication_error")
            case "too long":
                return 400, _error(400, "request (9 tokens) exceeds the available context size (8 tokens)", _TOO_LONG)
            case "silent":
                return 200, self._answer([])
            case "broken":
                return 500, _error(500, "out of memory", "server_error")
        for text in self.texts:
            if text[: len(prompt)] == prompt:
                found = text[len(prompt) : len(prompt) + count]
                return 200, self._answer([self._wrong(len(prompt) + index, token) for index, token in enumerate(found)])
        return 200, self._answer([])

    def _answer(self, tokens: list[int]) -> dict[str, Any]:
        chances = [{"id": token, "logprob": -0.1} for token in tokens]
        timings = {"prompt_n": 1, "prompt_ms": self.token_ms, "predicted_ms": (len(tokens) - 1) * self.token_ms}
        return {"tokens": tokens, "completion_probabilities": chances, "timings": timings}

    def _wrong(self, position: int, token: int) -> int:
        return (token + 1) % 256 if self.wrong_every and position % self.wrong_every == 0 else token


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error."""


@contextmanager
def serve_by_script(texts: Sequence[Sequence[int]], **script: Any) -> Iterator[ScriptedLlamaServer]:
    """Serve by script, in a thread of this process."""
    server = ScriptedLlamaServer(texts, **script)
    thread = threading.Thread(target=server.http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()


def _split(text: str) -> Iterator[tuple[int, str | list[int]]]:
    for part in re.split(f"({'|'.join(map(re.escape, CONTROLS))})", text):
        if part in CONTROLS:
            yield CONTROLS[part], part
        else:
            yield from ((byte, chr(byte) if byte < 128 else [byte]) for byte in part.encode())


def _error(code: int, message: str, kind: str) -> Any:
    return {"error": {"code": code, "message": message, "type": kind}}


def _build_handler(script: ScriptedLlamaServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        served = 0

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *_: Any) -> None: ...

        def _answer(self, body: dict[str, Any]) -> None:
            self.served += 1
            if script.fault == "closed" or self.served > script.kept_requests:
                self.close_connection = True
                return
            status, answer = 401, _error(401, "Invalid API Key", "authentication_error")
            wanted = f"Bearer {script.key}" if script.key else self.headers.get("Authorization")
            if self.headers.get("Authorization") == wanted:
                status, answer = script.answer(self.path, body)
            content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.close_connection = self.served >= script.kept_requests and not script.drops
            self.end_headers()
            self.wfile.write(content)

    return Handler
