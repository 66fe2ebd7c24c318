"""Writes answers of `/v1/messages`: whole, and as typed events in Anthropic's order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from orchestrator.daemon.api.doors.blocks import Block, BlockBuilder, Step
from orchestrator.daemon.api.doors.parts import name_event
from orchestrator.daemon.api.doors.signatures import sign_thought
from orchestrator.daemon.api.errors import anthropic_body_of
from orchestrator.daemon.api.question import AnswerHead, AnswerWriter
from orchestrator.daemon.api.streaming import Answer, Piece
from orchestrator.daemon.api.wire import ChatRequest
from orchestrator.errors import RequestError

INVALID_JSON = "INVALID_JSON"
"""Anthropic's name for arguments that are no JSON object, where an object is needed."""
_encode = msgspec.json.Encoder().encode


class MessageWriter(AnswerWriter):
    """`omits_thoughts`: their blocks have a signature in place of the text."""

    def __init__(self, head: AnswerHead, chat: ChatRequest, *, omits_thoughts: bool = False) -> None:
        super().__init__(head)
        self._omits_thoughts = omits_thoughts
        self._stops = frozenset(chat.stops)
        self._max_tokens = chat.max_tokens or 0
        self._builder = BlockBuilder()

    def whole(self, pieces: Sequence[Piece], answer: Answer) -> dict[str, Any]:
        self._builder.push_all(pieces)
        content = [self._content_block(block) for block in self._builder.blocks]
        return self._message(content) | self._end(answer) | {"usage": self._usage(answer)}

    def opening(self, _: int) -> bytes:
        end = {"stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": len(self._head.prompt), "output_tokens": 0}
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        return _event("message_start", message=self._message([]) | end | {"usage": usage | cached}) + _event("ping")

    def piece(self, piece: Piece, _: Answer) -> bytes:
        return b"".join(self._write_step(step) for step in self._builder.push(piece))

    def ending(self, answer: Answer) -> bytes:
        return _event("message_delta", delta=self._end(answer), usage=self._usage(answer)) + _event("message_stop")

    def ping(self) -> bytes:
        return _event("ping")

    def failure(self, error: RequestError, *, opened: bool) -> bytes:
        opening = b"" if opened else self.opening(1)
        return opening + name_event("error", _encode(anthropic_body_of(error)))

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._head.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            **self._warnings,
        }

    def _end(self, answer: Answer) -> dict[str, Any]:
        finish, why = self._builder.finish, self._builder.stop_reason
        stop = why if finish == "stop" and isinstance(why, str) and why in self._stops else None
        if finish == "length":
            full = answer.tokens < self._max_tokens and why is None
            return {"stop_reason": "model_context_window_exceeded" if full else "max_tokens", "stop_sequence": None}
        if finish == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": "end_turn" if stop is None else "stop_sequence", "stop_sequence": stop}

    def _usage(self, answer: Answer) -> dict[str, int]:
        """Return what it cost. Anthropic counts tokens that were remembered apart from those of the input."""
        return {
            "input_tokens": len(self._head.prompt) - answer.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": answer.cached_tokens,
            "output_tokens": answer.tokens,
        }

    def _write_step(self, step: Step) -> bytes:
        block = step.block
        if step.what == "begin":
            return _event(
                "content_block_start", index=block.index, content_block=self._content_block(block, empty=True)
            )
        hidden = block.kind == "thought" and self._omits_thoughts
        if step.what == "grow":
            return b"" if hidden else _event("content_block_delta", index=block.index, delta=_delta(step))
        signed = b""
        if block.kind == "thought":  # clients wait for one
            signature = {"type": "signature_delta", "signature": sign_thought(block.text) if hidden else ""}
            signed = _event("content_block_delta", index=block.index, delta=signature)
        return signed + _event("content_block_stop", index=block.index)

    def _content_block(self, block: Block, *, empty: bool = False) -> dict[str, Any]:
        text = "" if empty else block.text
        match block.kind:
            case "text":
                return {"type": "text", "text": text}
            case "thought":
                shown, signature = ("", sign_thought(text)) if self._omits_thoughts else (text, "")
                return {"type": "thinking", "thinking": shown, "signature": signature}
            case "call":
                arguments = {} if empty else _load_object(text)
                return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def _delta(step: Step) -> dict[str, Any]:
    match step.block.kind:
        case "text":
            return {"type": "text_delta", "text": step.text}
        case "thought":
            return {"type": "thinking_delta", "thinking": step.text}
        case "call":
            return {"type": "input_json_delta", "partial_json": step.text}


def _load_object(text: str) -> dict[str, Any]:
    """Return arguments as an object, or as text where no answer can have them: halves of characters, or too deep."""
    try:
        value = json.loads(text, strict=False)
        _encode([[value]])  # no less deep than the answer has it
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: text}


def _event(kind: str, **fields: Any) -> bytes:
    return name_event(kind, _encode({"type": kind, **fields}))
