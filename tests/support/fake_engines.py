"""Small HTTP servers that say what other engines' documentation says that they do, over the toy tokenizer's bytes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

END = 256
"""The toy tokenizer's end of text."""
ANSWER = list(b"hello")


@dataclass
class Reply:
    """What a route answers. `parts`: of the body, one write each. `breaks`: the connection ends behind them, as if the
    server had died."""

    parts: Sequence[str] = ()
    status: int = 200
    breaks: bool = False


@dataclass
class SeenRequest:
    """A request as the server saw it."""

    path: str
    body: dict[str, Any]
    authorization: str


Route = Callable[[dict[str, Any]], Reply]


@dataclass
class FakeEngine:
    """`routes` by path; `requests`: what was posted. A route may be replaced while it runs."""

    routes: dict[str, Route]
    port: int = 0
    requests: list[SeenRequest] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def list_prompts(self, path: str) -> list[Any]:
        """Return the prompts that a route was asked with, the probe's left out."""
        return [request.body.get("prompt") for request in self.requests if request.path == path][1:]


@contextmanager
def running_engine(routes: dict[str, Route]) -> Iterator[FakeEngine]:
    engine = FakeEngine(dict(routes))
    server = ThreadingHTTPServer(("127.0.0.1", 0), _make_handler(engine))
    server.daemon_threads = True
    engine.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield engine
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _make_handler(engine: FakeEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            engine.requests.append(SeenRequest(self.path, body, self.headers.get("authorization", "")))
            self._answer(body)

        def _answer(self, body: dict[str, Any]) -> None:
            route = engine.routes.get(self.path)
            reply = route(body) if route is not None else Reply(['{"detail": "Not Found"}'], 404)
            whole = sum(len(part.encode()) for part in reply.parts)
            self.send_response(reply.status)
            self.send_header("content-length", str(whole + reply.breaks))
            self.end_headers()
            for part in reply.parts:
                self.wfile.write(part.encode())
                self.wfile.flush()
            self.close_connection = True

    return Handler


def say(value: Any, status: int = 200) -> Route:
    """Return a route that always answers this."""
    return lambda body: Reply([value if isinstance(value, str) else json.dumps(value)], status)


def list_models(**entry: Any) -> Route:
    return say({"object": "list", "data": [{"id": "m", "object": "model", **entry}]})


def event(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


def tokenize(key: str) -> Route:
    return lambda body: Reply([json.dumps({"tokens": list(body[key].encode())})])


def count_prompt(body: dict[str, Any]) -> int:
    prompt = body["prompt"]
    return len(prompt) if isinstance(prompt, list) else len(prompt.encode())


def list_left(body: dict[str, Any]) -> list[int]:
    """Return what is left of the answer behind what the prompt has of it already, and its end."""
    prompt = body["prompt"] if isinstance(body["prompt"], list) else list(body["prompt"].encode())
    whole = [*ANSWER, END]
    done = next((n for n in range(len(ANSWER), 0, -1) if prompt[-n:] == whole[:n]), 0)
    return whole[done : done + body.get("max_tokens", body.get("n_predict", 99))]


def complete_with_ids(body: dict[str, Any]) -> Reply:
    """vLLM's and SGLang's frames: ids in every chunk, the prompt's in the first, the end's without text."""
    parts = []
    for index, token in enumerate(left := list_left(body)):
        ends = token == END
        last = index == len(left) - 1
        finish = "stop" if ends else "length" if last else None
        first = {"prompt_token_ids": body["prompt"]} if not index else {}
        choice = {
            "index": 0,
            "text": "" if ends else chr(token),
            "finish_reason": finish,
            "token_ids": [token],
            **first,
        }
        parts.append(event({"id": "cmpl-1-0", "object": "text_completion", "choices": [choice], "usage": None}))
    usage = {"prompt_tokens": count_prompt(body), "completion_tokens": len(left)}
    return Reply([*parts, event({"choices": [], "usage": usage}), "data: [DONE]\n\n"])


def complete_strictly(body: dict[str, Any]) -> Reply:
    """trtllm-serve's frames: ids without text, and 400 for a field that it does not know."""
    if unknown := body.keys() - _TRTLLM_FIELDS:
        return Reply([json.dumps({"error": f"Extra inputs are not permitted: {sorted(unknown)}"})], 400)
    assert body["detokenize"] is False
    left = list_left(body)
    parts = []
    for index, token in enumerate(left):
        finish = None if index < len(left) - 1 else "stop" if token == END else "length"
        choice = {"index": 0, "text": "", "token_ids": [token], "finish_reason": finish, "stop_reason": None}
        parts.append(event({"object": "text_completion", "choices": [choice], "usage": None}))
    return Reply([*parts, event({"choices": [], "usage": {"prompt_tokens": count_prompt(body)}}), "data: [DONE]\n\n"])


def complete_with_text(body: dict[str, Any]) -> Reply:
    """OpenVINO Model Server's frames: text alone, a string for a prompt."""
    if not isinstance(body["prompt"], str):
        return Reply(['{"error": "prompt is not a string"}'], 400)
    left = [token for token in list_left(body) if token != END]
    chunks = [(bytes(left[:2]).decode(), None), (bytes(left[2:]).decode(), "stop")]
    parts = [
        event({"choices": [{"index": 0, "text": text, "finish_reason": finish}], "object": "text_completion.chunk"})
        for text, finish in chunks
    ]
    usage = {"prompt_tokens": count_prompt(body) + 1, "completion_tokens": len(left)}  # it adds a begin of its own
    return Reply([*parts, event({"choices": [], "usage": usage}), "data: [DONE]\n\n"])


def generate_lines(body: dict[str, Any]) -> Reply:
    """Ollama's frames: a JSON object a line."""
    left = [token for token in list_left(body) if token != END]
    lines = [{"model": "m", "response": chr(token), "done": False} for token in left]
    lines.append({"model": "m", "response": "", "done": True, "done_reason": "stop", "prompt_eval_count": 3})
    return Reply([json.dumps(line) + "\n" for line in lines])


VLLM: dict[str, Route] = {
    "/v1/models": list_models(owned_by="vllm", max_model_len=512, root="org/m"),
    "/version": say({"version": "0.33.0"}),
    "/health": say(""),
    "/tokenize": tokenize("prompt"),
    "/v1/completions": complete_with_ids,
}
SGLANG: dict[str, Route] = {
    "/v1/models": list_models(owned_by="sglang", max_model_len=512),
    "/server_info": say({"version": "0.5.23"}),
    "/model_info": say({"model_path": "org/m", "weight_version": "default"}),
    "/tokenize": tokenize("prompt"),
    "/v1/completions": complete_with_ids,
}
_FIELDS = (
    "model prompt max_tokens stream stream_options temperature top_p top_k min_p seed frequency_penalty "
    "presence_penalty repetition_penalty stop_token_ids ignore_eos min_tokens logit_bias detokenize add_special_tokens"
)
_TRTLLM_FIELDS = frozenset(_FIELDS.split())
TRTLLM: dict[str, Route] = {
    "/v1/models": list_models(owned_by="tensorrt_llm"),
    "/version": say({"version": "1.3.0"}),
    "/v1/completions": complete_strictly,
}
GATEWAY: dict[str, Route] = {
    "/v1/models": list_models(owned_by="openai"),
    "/v1/completions": complete_with_text,
}
OLLAMA: dict[str, Route] = {
    "/v1/models": list_models(owned_by="library"),
    "/api/version": say({"version": "0.33.0"}),
    "/": say("Ollama is running"),
    "/api/tags": say({"models": [{"name": "m:latest", "digest": "abc"}]}),
    "/api/ps": say({"models": [{"name": "m:latest", "context_length": 512}]}),
    "/api/generate": generate_lines,
}
OVMS: dict[str, Route] = {
    "/v3/models": list_models(owned_by="OVMS"),
    "/v2": say({"name": "OpenVINO Model Server", "version": "2026.4.0"}),
    "/v3/tokenize": tokenize("text"),
    "/v3/completions": complete_with_text,
}
TGI: dict[str, Route] = {
    "/v1/models": list_models(owned_by="org/m"),
    "/info": say(
        {
            "router": "text-generation-router",
            "version": "3.3.6",
            "model_id": "org/m",
            "model_sha": "abc",
            "max_total_tokens": 512,
            "max_concurrent_requests": 128,
            "model_dtype": "float16",
        }
    ),
    "/tokenize": lambda body: Reply(
        [json.dumps([{"id": byte, "text": chr(byte)} for byte in body["inputs"].encode()])]
    ),
    "/v1/completions": complete_with_text,
}
