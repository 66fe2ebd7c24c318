"""Writes answers of `/v1/responses`: whole, and as typed events in OpenAI's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from http import HTTPStatus
from typing import Any

import msgspec

from orchestrator.daemon.api.conversation import HostedTool
from orchestrator.daemon.api.doors.blocks import Block, BlockBuilder, Step
from orchestrator.daemon.api.doors.parts import name_event
from orchestrator.daemon.api.doors.responses.wire import ResponsesRequest
from orchestrator.daemon.api.question import AnswerHead, AnswerWriter
from orchestrator.daemon.api.responses import describe_metrics
from orchestrator.daemon.api.streaming import Answer, Piece
from orchestrator.daemon.api.wire import ChatRequest
from orchestrator.errors import RequestError

_ID_BYTES = 12
_PREFIXES = {"thought": "rs", "text": "msg", "call": "fc"}
_TOLD_AGAIN = (
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "previous_response_id", "temperature"),
    "top_p",
)
_encode = msgspec.json.Encoder().encode
Keep = Callable[[str, dict[str, Any]], None]


class ResponseWriter(AnswerWriter):
    """`keep` is given the response once it is whole; without one the response is not kept."""

    def __init__(self, head: AnswerHead, body: ResponsesRequest, chat: ChatRequest, keep: Keep | None) -> None:
        super().__init__(head)
        self._body = body
        self._keep = keep
        self._called = {function.full_name: function for function in body.functions}
        self._builder = BlockBuilder()
        self._number = 0

    def whole(self, pieces: Sequence[Piece], answer: Answer) -> dict[str, Any]:
        self._builder.push_all(pieces)
        self._end_with_text()
        return self._end(answer)

    def opening(self, _: int) -> bytes:
        return b"".join(
            self._event(kind, response=self._response("in_progress"))
            for kind in ("response.created", "response.in_progress")
        )

    def piece(self, piece: Piece, _: Answer) -> bytes:
        return b"".join(self._write_step(step) for step in self._builder.push(piece))

    def ending(self, answer: Answer) -> bytes:
        steps = b"".join(self._write_step(step) for step in self._end_with_text())
        response = self._end(answer)
        return steps + self._event(f"response.{response['status']}", response=response)

    def failure(self, error: RequestError, *, opened: bool) -> bytes:
        opening = b"" if opened else self.opening(1)
        code = "server_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_prompt"
        failure = {"code": code, "message": error.message.encode("utf-8", "backslashreplace").decode()}
        return opening + self._event("response.failed", response=self._response("failed") | {"error": failure})

    def _end_with_text(self) -> list[Step]:
        """An answer without anything is an empty text: clients look for one."""
        if self._builder.blocks:
            return []
        block = Block(0, "text", whole=self._builder.finish != "length")
        self._builder.blocks.append(block)
        return [Step("begin", block), Step("end", block)]

    def _end(self, answer: Answer) -> dict[str, Any]:
        cut = self._builder.finish == "length"
        response = self._response("incomplete" if cut else "completed") | {
            "completed_at": None if cut else self._head.created_s + int(answer.last_s - answer.started_s),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._item(block) for block in self._builder.blocks],
            "usage": self._usage(answer),
            "metrics": describe_metrics(answer, self._head.rule),
        }
        if self._keep is not None:
            self._keep(self._head.request_id, response)
        return response

    def _usage(self, answer: Answer) -> dict[str, Any]:
        thought = self._builder.join("thought")
        thought_tokens = len(self._head.tokenizer.encode(thought, special=False)) if thought else 0
        return {
            "input_tokens": len(self._head.prompt),
            "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answer.tokens,
            "output_tokens_details": {"reasoning_tokens": min(thought_tokens, answer.tokens)},
            "total_tokens": len(self._head.prompt) + answer.tokens,
        }

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._head.request_id,
            "object": "response",
            "created_at": self._head.created_s,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            **{name: getattr(body, name) for name in _TOLD_AGAIN},
            "model": self._head.model,
            "output": [],
            "reasoning": body.reasoning.model_dump(include={"effort", "summary"}),
            "store": self._keep is not None,
            "system_fingerprint": self.source.fingerprint,
            "text": {"format": body.text.format.model_dump(exclude_unset=True, by_alias=True) | {
                "type": body.text.format.type
            }},
            "tool_choice": _tell_choice(body.tool_choice),
            "tools": [tool.model_dump() for tool in body.tools if not isinstance(tool, HostedTool)],
            "truncation": "disabled",
            "usage": None,
            "user": body.user or None,
            **self._warnings,
        }  # fmt: skip

    def _write_step(self, step: Step) -> bytes:
        place = {"output_index": step.block.index}
        if step.what == "grow":
            return self._grow(step, place | {"item_id": self._item_id(step.block)})
        if step.what == "begin":
            item = self._item(step.block, empty=True)
            added = self._event("response.output_item.added", **place, item=item)
            return added + self._part(step.block, "added", "")
        ended = self._end_of_text(step.block, place | {"item_id": self._item_id(step.block)})
        return ended + self._event("response.output_item.done", **place, item=self._item(step.block))

    def _grow(self, step: Step, place: dict[str, Any]) -> bytes:
        match step.block.kind:
            case "text":
                more = {"content_index": 0, "delta": step.text, "logprobs": []}
                return self._event("response.output_text.delta", **place, **more)
            case "thought":
                return self._event("response.reasoning_text.delta", **place, content_index=0, delta=step.text)
            case "call":
                return self._event("response.function_call_arguments.delta", **place, delta=step.text)

    def _end_of_text(self, block: Block, place: dict[str, Any]) -> bytes:
        match block.kind:
            case "text":
                more = {"content_index": 0, "text": block.text, "logprobs": []}
                done = self._event("response.output_text.done", **place, **more)
            case "thought":
                done = self._event("response.reasoning_text.done", **place, content_index=0, text=block.text)
            case "call":
                more = {"name": self._name(block)["name"], "arguments": block.text}
                return self._event("response.function_call_arguments.done", **place, **more)
        return done + self._part(block, "done", block.text)

    def _part(self, block: Block, what: str, text: str) -> bytes:
        if block.kind == "call":
            return b""
        place = {"item_id": self._item_id(block), "output_index": block.index, "content_index": 0}
        return self._event(f"response.content_part.{what}", **place, part=_content_part(block, text))

    def _item(self, block: Block, *, empty: bool = False) -> dict[str, Any]:
        status = "in_progress" if empty else "completed" if block.whole else "incomplete"
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        content = [] if empty else [_content_part(block, block.text)]
        match block.kind:
            case "text":
                return item | {"type": "message", "role": "assistant", "content": content}
            case "thought":
                return item | {"type": "reasoning", "summary": [], "content": content}
            case "call":
                call = {"type": "function_call", "call_id": block.call_id, **self._name(block)}
                return item | call | {"arguments": "" if empty else block.text}

    def _name(self, block: Block) -> dict[str, str]:
        """Return the name of what was called as the request had it, with its namespace where it is of one."""
        named = self._called.get(block.name)
        if named is None or not named.namespace:
            return {"name": block.name}
        return {"name": named.tool.name, "namespace": named.namespace}

    def _item_id(self, block: Block) -> str:
        """Return an item's id: an answer that is told again has the same ones."""
        place = f"{self._head.request_id} {block.index}".encode()
        return f"{_PREFIXES[block.kind]}_{blake2b(place, digest_size=_ID_BYTES).hexdigest()}"

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = _encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return name_event(kind, data)


def _tell_choice(choice: Any) -> Any:
    return choice if isinstance(choice, str) else choice.model_dump(exclude_none=True)


def _content_part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
