"""Answers on the wire: whole bodies, and server-sent events. OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from adapters.tokenizer import Tokenizer
from orchestrator.daemon.api.errors import body_of, parse_body
from orchestrator.daemon.api.logprobs import ScoredToken, chat_logprobs, completion_logprobs
from orchestrator.daemon.api.question import AnswerHead, AnswerWriter, Question, describe_effective_speculation
from orchestrator.daemon.api.resume import CALLS, END, OPENING, TEXT
from orchestrator.daemon.api.streaming import Answer, Piece
from orchestrator.daemon.api.tools.calls import whole_calls
from orchestrator.daemon.api.wire import ChatRequest, CompletionRequest, StreamOptions
from orchestrator.errors import RequestError
from orchestrator.json_lines import escape_line_ends
from orchestrator.protocol.rounds import RequestStats
from policies.sampling import Rule

Kind = Literal["chat", "completion"]
RenderLogprobs = Callable[[Sequence[ScoredToken]], dict[str, Any]]
DONE = b"data: [DONE]\n\n"
_OBJECTS = {
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
    ("completion", False): "text_completion",
    ("completion", True): "text_completion",
}
_encode = msgspec.json.Encoder().encode


class Envelope(AnswerWriter):
    """What every chunk of one answer repeats: id, time and model; builds bodies and events of either kind. `each`: how
    many choices a prompt has. `predicted`: the request brought a prediction."""

    def __init__(
        self,
        kind: Kind,
        head: AnswerHead,
        options: StreamOptions,
        logprobs: RenderLogprobs | None = None,
        *,
        each: int = 1,
        predicted: bool = False,
    ) -> None:
        super().__init__(head)
        self._kind = kind
        self._options = options
        self._always = options.include_usage and options.continuous_usage_stats
        self._prompt_tokens = [len(prompt) for prompt in head.prompts]
        self._each = each
        self._logprobs = logprobs
        self._predicted = predicted

    def whole(self, pieces: Sequence[Piece], answer: Answer) -> dict[str, Any]:
        choices = [
            self._whole_choice(index, [piece for piece in pieces if piece.index == index])
            for index in sorted({piece.index for piece in pieces})
        ]
        return {**self._with_object(stream=False), "choices": choices, **self._cost(answer), **self._warnings}

    def _whole_choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        calls = whole_calls([delta for piece in pieces for delta in piece.calls])
        message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text, "refusal": None}
        if thought := "".join(piece.thought for piece in pieces):
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        content: dict[str, Any] = {"message": message} if self._kind == "chat" else {"text": text}
        tokens = [token for piece in pieces for token in piece.tokens]
        logprobs = None if self._logprobs is None else self._logprobs(tokens)
        end = {"finish_reason": pieces[-1].finish, "stop_reason": pieces[-1].stop_reason}
        return {"index": index, **content, "logprobs": logprobs, **end}

    def opening(self, choices: int) -> bytes:
        if self._kind == "completion":
            return b""
        so_far = 0 if self._always else None
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, (0, OPENING), role, None, so_far=so_far) for index in range(choices))

    def piece(self, piece: Piece, answer: Answer) -> bytes:
        """Return the events of a piece: thoughts and text with tokens, calls, and why its choice ended. The choice's
        tokens so far are told with each where the request asks for that."""
        so_far = answer.tokens if self._always else None
        events = b""
        if piece.text or piece.thought or piece.tokens:
            delta = {"reasoning_content": piece.thought} if piece.thought else {}
            if piece.text or not delta:
                delta["content"] = piece.text
            logprobs = self._logprobs(piece.tokens) if self._logprobs is not None and piece.tokens else None
            events = self._chunk(piece.index, (piece.at, TEXT), delta, None, logprobs, so_far)
        for number, call in enumerate(piece.calls, CALLS):
            events += self._chunk(piece.index, (piece.at, number), {"tool_calls": [call]}, None, so_far=so_far)
        return events + self._end(piece, so_far) if piece.finish else events

    def ending(self, answer: Answer) -> bytes:
        return (self._usage_event(answer) if self._options.include_usage else b"") + DONE

    def failure(self, error: RequestError, *, opened: bool) -> bytes:
        """Return the events of an answer that ends with an error; of one that was not `opened` they are all."""
        return event(body_of(error)) + DONE

    def _end(self, piece: Piece, so_far: int | None) -> bytes:
        place = (piece.at, END)
        return self._chunk(piece.index, place, {}, piece.finish, so_far=so_far, stop_reason=piece.stop_reason)

    def _usage_event(self, answer: Answer) -> bytes:
        name = "" if self._head.cursor is None else self._head.cursor.name_usage()
        if name is None:
            return b""
        return event({**self._with_object(stream=True), "choices": [], **self._cost(answer)}, name)

    def _with_object(self, *, stream: bool) -> dict[str, Any]:
        head = {"id": self._head.request_id, "created": self._head.created_s, "model": self._head.model}
        return {**head, "system_fingerprint": self.source.fingerprint, "object": _OBJECTS[self._kind, stream]}

    def _chunk(
        self,
        index: int,
        place: tuple[int, int],
        delta: dict[str, Any],
        finish: str | None,
        logprobs: dict[str, Any] | None = None,
        so_far: int | None = None,
        **more: Any,
    ) -> bytes:
        if self._head.cursor is not None and not self._head.cursor.is_new(index, *place):
            return b""
        name = "" if self._head.cursor is None else self._head.cursor.name_event(index, *place)
        content = {"delta": delta} if self._kind == "chat" else {"text": delta.get("content", "")}
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish, **more}
        usage = {} if so_far is None else {"usage": _usage(self._prompt_tokens[index // self._each], so_far)}
        warnings = self._warnings if finish else {}
        return event({**self._with_object(stream=True), "choices": [choice], **usage, **warnings}, name)

    def _cost(self, answer: Answer) -> dict[str, Any]:
        counts = _usage(sum(self._prompt_tokens), answer.tokens)
        usage: dict[str, Any] = {**counts, "prompt_tokens_details": {"cached_tokens": answer.cached_tokens}}
        if other_bits := self.list_other_bits(answer):
            usage["system_fingerprints"] = other_bits
        if self._predicted and answer.stats is not None:
            usage["completion_tokens_details"] = describe_prediction(answer.stats)
        return {"usage": usage, "metrics": describe_metrics(answer, self._head.rule)}


def _usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    total = prompt_tokens + tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": total}


def read_completion(raw: bytes) -> Question:
    """Read a body of `/v1/completions`. Raises RequestError."""
    body: CompletionRequest = parse_body(CompletionRequest, raw)
    return _ask("completion", body, "/v1/completions", "cmpl-", completion_logprobs)


def read_chat(raw: bytes) -> Question:
    """Read a body of `/v1/chat/completions`. Raises RequestError."""
    body: ChatRequest = parse_body(ChatRequest, raw)
    return _ask("chat", body, "/v1/chat/completions", "chatcmpl-", chat_logprobs)


def _ask(
    kind: Kind,
    body: CompletionRequest | ChatRequest,
    route: str,
    id_prefix: str,
    render: Callable[[Sequence[ScoredToken], Tokenizer], dict[str, Any]],
) -> Question:
    def build_writer(head: AnswerHead) -> Envelope:
        logprobs = None if body.wanted_logprobs is None else lambda tokens: render(tokens, head.tokenizer)
        predicted = isinstance(body, ChatRequest) and body.prediction is not None
        options = body.stream_options or StreamOptions()
        return Envelope(kind, head, options, logprobs, each=body.n, predicted=predicted)

    return Question(body, route, id_prefix, build_writer, unused=body.unused)


def describe_prediction(stats: RequestStats) -> dict[str, int]:
    return {
        "accepted_prediction_tokens": stats.predicted_right,
        "rejected_prediction_tokens": stats.predicted - stats.predicted_right,
    }


def describe_metrics(answer: Answer, rule: Rule) -> dict[str, Any]:
    """Return vLLM's per-request figures; the formulas are in docs/metrics.md."""
    stats = answer.stats
    figures: dict[str, Any] = {
        "time_to_first_token_ms": (answer.first_s - answer.started_s) * 1000.0,
        "generation_time_ms": (answer.last_s - answer.first_s) * 1000.0,
    }
    if stats is not None:
        figures["queue_time_ms"] = stats.queue_ms
        figures["speculative_decoding"] = {
            "mean_acceptance_length": 1.0 + stats.accepted / max(1, stats.steps),
            "draft_acceptance_rate": stats.accepted / stats.drafted if stats.drafted else None,
            "num_spec_steps": stats.steps,
            "num_draft_tokens": stats.drafted,
            "num_accepted_draft_tokens": stats.accepted,
            "acceptance": rule,
            "tolerance_delta": stats.tolerance_delta if stats.tolerance_delta >= 0.0 else None,
            "num_tolerated_tokens": stats.tolerated,
            "effective": describe_effective_speculation(answer.speculation),
        }
    return figures


def event(body: dict[str, Any], name: str = "") -> bytes:
    data = b"data: " + escape_line_ends(_encode(body)) + b"\n\n"
    return f"id: {name}\n".encode() + data if name else data


def json_response(body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(_encode(body), media_type="application/json", headers=headers)
