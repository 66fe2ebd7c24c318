"""Bodies up to their bound, packed or not, and whether a large one can fit at all: seen before it is parsed, rendered
or tokenised.

That takes milliseconds. Only the outline of the JSON is read: values stay as they were sent. A request that passes may
still be refused later.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
from backports import zstd
from starlette.requests import Request

from adapters.tokenizer import Tokenizer
from orchestrator.daemon.api.doors.signatures import read_signature
from orchestrator.daemon.api.shares import build_refusal
from orchestrator.daemon.api.wire import MAX_SEQUENCES
from orchestrator.errors import ContextExceeded, RequestError

SMALL_BODY_BYTES = 16 * 1024
"""A smaller body is not looked at: to parse it takes no longer. ADR 0047."""
_T = TypeVar("_T")
_NOTHING = msgspec.Raw(b"")
_MESSAGE_BYTES = 64
"""What a message may have beside its content, in the mean, before that counts as parameters. ADR 0047."""
_decode_text = msgspec.json.Decoder(str).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
# What a body may grow too large by before it is seen. Not tuned.
_PIECE_BYTES: Final = 64 * 1024
_GZIP_BITS: Final = 16 + zlib.MAX_WBITS  # gzip, in zlib's words
_WINDOW_BITS: Final = 23
"""RFC 9659: HTTP's zstd needs no window above 8 MiB. The memory of one body is bounded by it."""
_TAKEN: Final = "gzip, zstd"


class _Outline(msgspec.Struct):
    prompt: msgspec.Raw = _NOTHING
    suffix: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    prediction: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    system: msgspec.Raw = _NOTHING
    instructions: msgspec.Raw = _NOTHING
    response_format: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    tokens: msgspec.Raw = _NOTHING


class _Part(msgspec.Struct):
    """A part of a content. `content`: of a tool's result, which has parts of its own."""

    text: str = ""
    thinking: str | None = None
    signature: str | None = None
    content: msgspec.Raw = _NOTHING


class _MessageOutline(msgspec.Struct):
    """A message, or an item of `input`, of which a call has `arguments` or an `input`, and its result an `output`."""

    content: msgspec.Raw = _NOTHING
    arguments: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    output: msgspec.Raw = _NOTHING

    @property
    def texts(self) -> tuple[msgspec.Raw, ...]:
        return (self.content, self.arguments, self.input, self.output)


_decode_outline = msgspec.json.Decoder(_Outline).decode
_decode_messages = msgspec.json.Decoder(list[_MessageOutline]).decode
_decode_message = msgspec.json.Decoder(_MessageOutline | None).decode
_decode_parts = msgspec.json.Decoder(list[_Part]).decode


@dataclass(slots=True)
class BodyBudget:
    """Bytes of bodies that are read and translated at one time, of all requests together: `most`."""

    most: int
    held: int = 0
    refused: int = 0

    @contextmanager
    def hold(self) -> Iterator[BodyShare]:
        share = BodyShare(self)
        try:
            yield share
        finally:
            share.resize(0)


@dataclass(slots=True)
class BodyShare:
    budget: BodyBudget
    size: int = 0

    def resize(self, size: int) -> None:
        """Take in all so many bytes. Raises RequestError where there are not as many."""
        more = size - self.size
        if more > 0 and self.budget.held + more > self.budget.most and self.budget.held > self.size:
            self.budget.refused += 1
            text = "too many bytes of request bodies are being read (limits.max_bodies)"
            raise build_refusal(text, "bodies_full", 1.0)
        self.budget.held += more
        self.size = size


async def read_body(request: Request, share: BodyShare, most: int) -> bytes:
    """Read a body, up to so many bytes, packed or unpacked. Raises RequestError 413, or 415 for what is not taken."""
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise RequestError(
            f"the body is declared as {kind!r}: send JSON, with 'Content-Type: application/json'",
            status=415,
            code="unsupported_media_type",
        )
    unpacker = build_unpacker(request.headers.get("Content-Encoding", ""))
    declared = request.headers.get("Content-Length", "")
    body, received = bytearray(), 0
    too_large = RequestError(f"the body is larger than {most} bytes", status=413, code="body_too_large")
    if declared.isdecimal() and int(declared) > most:
        raise too_large
    async for chunk in request.stream():
        received += len(chunk)
        for piece in unpacker.unpack(chunk):
            body += piece
            if len(body) > most:
                raise too_large
            share.resize(len(body))
            if len(body) > received:  # it was packed: others are to have their turns meanwhile
                await asyncio.sleep(0)
        if received > most:
            raise too_large
    unpacker.finish()
    return bytes(body)


def refuse_oversized(raw: bytes, tokenizer: Tokenizer, max_tokens: int, max_parameter_bytes: int) -> None:
    """Raise ContextExceeded where a prompt of this body has more tokens than `max_tokens`, whatever they are. Raise
    RequestError where the rest is larger than `max_parameter_bytes`. Passes whatever it cannot judge and is not
    large."""
    if len(raw) <= SMALL_BODY_BYTES:
        return
    outline = _decode(_decode_outline, raw, "the body is not JSON", "invalid_json")
    texts = {"system": outline.system, "instructions": outline.instructions}
    texts |= {"input": outline.input, "suffix": outline.suffix}
    prompts = (outline.prompt, outline.messages, outline.prediction, outline.tokens, *texts.values())
    beside = len(raw) - sum(len(part) for part in prompts)
    if beside > max_parameter_bytes:
        raise _too_large(outline, beside, max_parameter_bytes)
    if len(outline.prompt):
        _check_prompts(outline.prompt, tokenizer, max_tokens)
    if len(outline.tokens):
        _refuse_if_above(_count_elements(outline.tokens), max_tokens, "tokens")
    for param, text in texts.items():
        if _begin(text)[:1] == b"[" and param == "input":
            _check_messages(text, param, tokenizer, max_tokens, max_parameter_bytes)
        elif len(text):
            _refuse_if_above(_count_content(text, param, tokenizer, max_tokens), max_tokens, param)
    if len(outline.prediction):
        prediction = _decode(
            _decode_message, outline.prediction, "'prediction' is no object", "invalid_value", "prediction"
        )
        if prediction is not None:
            counted = _count_content(prediction.content, "prediction", tokenizer, max_tokens)
            _refuse_if_above(counted, max_tokens, "prediction")
    if len(outline.messages):
        _check_messages(outline.messages, "messages", tokenizer, max_tokens, max_parameter_bytes)


def _check_messages(
    raw: msgspec.Raw, param: str, tokenizer: Tokenizer, max_tokens: int, max_parameter_bytes: int
) -> None:
    messages = _decode(_decode_messages, raw, f"'{param}' is no list of messages", "invalid_value", param)
    _refuse_if_above(len(messages), max_tokens, param)
    beside = len(raw) - sum(len(text) for message in messages for text in message.texts)
    most = max_parameter_bytes + _MESSAGE_BYTES * len(messages)
    if beside > most:
        raise RequestError(
            f"the messages have {beside} bytes beside their content; {most} are taken (limits.max_parameters)",
            code="parameters_too_large",
            param=param,
        )
    count = 0
    for message in messages:
        for content in message.texts:
            count += _count_content(content, param, tokenizer, max_tokens - count)
            _refuse_if_above(count, max_tokens, param)


def _count_content(raw: msgspec.Raw, param: str, tokenizer: Tokenizer, enough: int, *, inside: bool = True) -> int:
    """Return how many tokens a text, or a list of parts, has at the least. `inside`: contents of parts count, too."""
    first = _begin(raw)[:1]
    if first == b'"':
        return tokenizer.count_min_tokens(_decode(_decode_text, raw, "a text is no JSON", "invalid_json"), enough)
    if first != b"[":
        return 0
    parts = _decode(_decode_parts, raw, "a message's content is no list of text parts", "invalid_value", param)
    count = _count_texts(
        [part.text or part.thinking or read_signature(part.signature) for part in parts], tokenizer, enough
    )
    for part in parts if inside else []:
        if count > enough:
            break
        count += _count_content(part.content, param, tokenizer, enough - count, inside=False)
    return count


def _check_prompts(raw: msgspec.Raw, tokenizer: Tokenizer, max_tokens: int) -> None:
    """Check each prompt: one text, one list of token ids, or a list of such."""
    begin = _begin(raw)
    several = begin[:1] == b"[" and begin[1:].lstrip()[:1] in (b'"', b"[")
    prompts = _decode(_decode_list, raw, "'prompt' is no list", "invalid_value", "prompt") if several else [raw]
    for number, prompt in enumerate(prompts[: MAX_SEQUENCES + 1]):  # more are refused whatever they are
        param = "prompt" if len(prompts) == 1 else f"prompt.{number}"
        ids = _begin(prompt)[:1] == b"["
        least = _count_elements(prompt) if ids else _count_content(prompt, param, tokenizer, max_tokens)
        _refuse_if_above(least, max_tokens, param)


def _count_texts(texts: list[str], tokenizer: Tokenizer, enough: int) -> int:
    count = 0
    for text in texts:
        if count > enough:
            break
        count += tokenizer.count_min_tokens(text, enough - count)
    return count


def _begin(raw: msgspec.Raw) -> bytes:
    return bytes(memoryview(raw)[:64])


def _count_elements(raw: msgspec.Raw) -> int:
    return bytes(raw).count(b",") + 1


def _refuse_if_above(count: int, most: int, param: str) -> None:
    if count > most:
        raise ContextExceeded(most, count, param=param, at_least=True)


def _too_large(outline: _Outline, beside: int, most: int) -> RequestError:
    sizes = {"response_format": len(outline.response_format), "tools": len(outline.tools)}
    largest = max(sizes, key=lambda name: sizes[name])
    named = f", '{largest}' alone {sizes[largest]}" if sizes[largest] > most // 2 else ""
    return RequestError(
        f"the parameters beside the prompt have {beside} bytes{named}; {most} are taken: send a smaller schema or "
        "fewer tools, or ask the operator for a larger limits.max_parameters",
        code="parameters_too_large",
        param=largest if named else None,
    )


def _decode(decode: Callable[..., _T], raw: bytes | msgspec.Raw, what: str, code: str, param: str | None = None) -> _T:
    try:
        return decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"{what}: {error}", code=code, param=param) from None


class Unpacker:
    """Takes a body as it comes, so that one that grows without end is seen at once. This one is not packed."""

    def unpack(self, data: bytes) -> Iterator[bytes]:
        """Yield what these bytes become, at most 64 KiB of what is packed at a time. Raises RequestError."""
        yield data

    def finish(self) -> None:
        """The body has ended. Raises RequestError where it has not come to its own end."""


class _Packed(Unpacker):
    """One or several frames, one behind the other. Both formats allow that."""

    name = ""
    broken: type[Exception] = ValueError

    def __init__(self) -> None:
        self._begun = False
        self._frame = self._open()

    def _open(self) -> Any:
        raise NotImplementedError

    def _step(self, data: bytes) -> tuple[bytes, bytes, bool]:
        """Unpack some; (what came of it, what is left to unpack, whether to go on)."""
        raise NotImplementedError

    def unpack(self, data: bytes) -> Iterator[bytes]:
        goes_on = bool(data)
        self._begun = self._begun or goes_on
        while goes_on:
            if self._frame.eof:
                self._frame = self._open()
            try:
                piece, data, goes_on = self._step(data)
            except self.broken as error:
                raise self._refuse(str(error)) from None
            if piece:
                yield piece

    def finish(self) -> None:
        if self._begun and not self._frame.eof:
            raise self._refuse("it ends too early")

    def _refuse(self, why: str) -> RequestError:
        return RequestError(f"the body is declared as {self.name}, and is none: {why}", code="invalid_encoding")


class _Gzip(_Packed):
    name = "gzip"
    broken = zlib.error

    def _open(self) -> Any:
        return zlib.decompressobj(_GZIP_BITS)

    def _step(self, data: bytes) -> tuple[bytes, bytes, bool]:
        piece = self._frame.decompress(data, _PIECE_BYTES)
        left = self._frame.unused_data if self._frame.eof else self._frame.unconsumed_tail
        return piece, left, bool(left)


class _Zstd(_Packed):
    name = "zstd"
    broken = zstd.ZstdError

    def _open(self) -> Any:
        return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_BITS})

    def _step(self, data: bytes) -> tuple[bytes, bytes, bool]:
        piece = self._frame.decompress(data, _PIECE_BYTES)  # keeps what it has not unpacked yet
        left = self._frame.unused_data if self._frame.eof else b""
        return piece, left, bool(left) or not (self._frame.eof or self._frame.needs_input)


_UNPACKERS: Final[dict[str, type[_Packed]]] = {"gzip": _Gzip, "x-gzip": _Gzip, "zstd": _Zstd}


def build_unpacker(encoding: str) -> Unpacker:
    """Return what unpacks a body of this `Content-Encoding`. Raises RequestError 415 for others, and for several."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return Unpacker()
    if name not in _UNPACKERS:
        raise RequestError(
            f"the body is packed as {name[:60]!r}: send it as it is, or by one of {_TAKEN}",
            status=415,
            code="unsupported_media_type",
            headers={"Accept-Encoding": _TAKEN},
        )
    return _UNPACKERS[name]()


async def unpack_stream(stream: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    """Yield the pieces of a body of this `Content-Encoding` as it comes; others have their turns between two. Raises
    RequestError as `build_unpacker` and Unpacker do."""
    unpacker = build_unpacker(encoding)
    async for chunk in stream:
        for piece in unpacker.unpack(chunk):
            yield piece
            await asyncio.sleep(0)
    unpacker.finish()
