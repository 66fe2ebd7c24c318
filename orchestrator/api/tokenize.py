"""`/tokenize` and `/detokenize`, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol

from fastapi import FastAPI, Request
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.api import errors
from orchestrator.api.openapi import operation
from orchestrator.api.port import TokenizerPort
from orchestrator.api.tools.wire import MAX_TOOLS, Tool
from orchestrator.api.translate import chat_prompt
from orchestrator.api.wire import Body, Message
from orchestrator.errors import RequestError


class TokenizeRequest(Body):
    """`POST /tokenize`: the tokens of a text, or of messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    """A text's begin token, where the model has one. Templates bring their own, so messages take only false."""
    add_generation_prompt: bool = True
    tools: list[Tool] = Field(default=[], max_length=MAX_TOOLS)
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("either", "give either 'prompt' or 'messages'", {"field": "prompt"})
        if self.messages is not None and self.add_special_tokens:
            text = "'add_special_tokens' is not for messages: the chat template brings its own"
            raise PydanticCustomError("not_supported", "{text}", {"field": "add_special_tokens", "text": text})
        return self


class DetokenizeRequest(Body):
    """`POST /detokenize`: the text of tokens, control tokens included."""

    model: str | None = None
    tokens: list[int]


class TokenizeResponse(Body):
    """What `/tokenize` answers."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(Body):
    """What `/detokenize` answers."""

    prompt: str


class ModelApi(Protocol):
    """What these routes need of the API."""

    def read(self, request: Request) -> Awaitable[bytes]: ...

    def resolve_model(self, model: str | None) -> tuple[TokenizerPort, int]: ...


def install_tokenize_routes(app: FastAPI, served: ModelApi) -> None:
    """Add both routes."""

    @app.post("/tokenize", **operation(TokenizeRequest, TokenizeResponse))
    async def tokenize(request: Request) -> dict[str, Any]:
        body: TokenizeRequest = errors.parse_body(TokenizeRequest, await served.read(request))
        tokenizer, context = served.resolve_model(body.model)
        tokens = _tokens(body, tokenizer)
        names = [_text(tokenizer, token) for token in tokens] if body.return_token_strs else None
        return {"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": names}

    @app.post("/detokenize", **operation(DetokenizeRequest, DetokenizeResponse))
    async def detokenize(request: Request) -> dict[str, Any]:
        body: DetokenizeRequest = errors.parse_body(DetokenizeRequest, await served.read(request))
        tokenizer, _ = served.resolve_model(body.model)
        wrong = next((token for token in body.tokens if not 0 <= token < tokenizer.vocabulary_size), None)
        if wrong is not None:
            text = f"token {wrong} is outside the vocabulary of {tokenizer.vocabulary_size}"
            raise RequestError(text, param="tokens")
        return {"prompt": tokenizer.decode(body.tokens, skip_special=False)}


def _tokens(body: TokenizeRequest, tokenizer: TokenizerPort) -> list[int]:
    if body.messages is not None:
        return chat_prompt(body.messages, tokenizer, body.tools, add_generation_prompt=body.add_generation_prompt)
    text = body.prompt or ""
    if body.add_special_tokens is False:
        return tokenizer.encode(text, special=True)
    return tokenizer.encode_prompt(text, special=True)


def _text(tokenizer: TokenizerPort, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")
