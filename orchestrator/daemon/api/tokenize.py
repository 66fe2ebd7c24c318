"""`/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from adapters.tokenizer import Tokenizer
from orchestrator.daemon.api import conversation, errors
from orchestrator.daemon.api.body_bounds import refuse_oversized
from orchestrator.daemon.api.openapi import operation
from orchestrator.daemon.api.responses import json_response
from orchestrator.daemon.api.translate import chat_prompt
from orchestrator.daemon.api.wire import keep_known
from orchestrator.errors import ContextExceeded, RequestError

if TYPE_CHECKING:  # it imports us
    from orchestrator.daemon.api.app import ApiRoutes

_LEAST_BOUND = 65_536  # as below, for models of short contexts
_CONTEXTS = 4
"""Texts are tokenised up to so many contexts, and at least up to so many tokens. ADR 0047 bounds the rest. Not
tuned."""
_STATUSES = (400, 401, 404, 413, 415, 429, 500, 503)  # HTTP's


class _Asked(conversation.Body):
    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _keep_known(cls, data: Any) -> Any:
        return keep_known(data, cls.model_fields)


class TokenizeRequest(_Asked):
    """`POST /tokenize`: the tokens of a text, or of messages through the chat template."""

    prompt: str | None = None
    messages: list[conversation.Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    """A text's begin token, where the model has one. Templates bring their own, so messages take only false."""
    add_generation_prompt: bool = True
    tools: list[conversation.OfferedTool] = Field(default=[], max_length=conversation.MAX_TOOLS)
    reasoning_effort: conversation.Effort | None = None
    chat_template_kwargs: conversation.TemplateKeywords = Field(default={})
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("either", "give either 'prompt' or 'messages'", {"field": "prompt"})
        if self.messages is not None and self.add_special_tokens:
            text = "'add_special_tokens' is not for messages: the chat template brings its own"
            raise PydanticCustomError("not_supported", "{text}", {"field": "add_special_tokens", "text": text})
        return self


class DetokenizeRequest(_Asked):
    """`POST /detokenize`: the text of tokens, control tokens included."""

    tokens: list[int]


_T = TypeVar("_T", bound=_Asked)


class TokenizeResponse(conversation.Body):
    """What `/tokenize` answers."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(conversation.Body):
    """What `/detokenize` answers."""

    prompt: str


class TokenizerInfo(conversation.Body):
    """What `/tokenizer_info` answers: the fields of a tokenizer_config.json. Texts are null where there is no such
    token, and the template where the model has none."""

    tokenizer_class: str
    model_max_length: int
    add_bos_token: bool
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    additional_special_tokens: list[str]
    added_tokens_decoder: dict[str, str]
    clean_up_tokenization_spaces: bool
    chat_template: str | None


def install_tokenize_routes(app: FastAPI, served: ApiRoutes) -> None:
    def parse(model: type[_T], raw: bytes) -> tuple[_T, Tokenizer, int]:
        named = served.models.choose(raw)
        tokenizer, context = named.require_ready()
        most = max(_LEAST_BOUND, _CONTEXTS * context)
        try:
            refuse_oversized(raw, tokenizer, most, served.max_parameter_bytes)
        except ContextExceeded as error:
            text = f"at most {most} tokens are taken here; '{error.param}' has at least {error.prompt_tokens}"
            raise RequestError(text, code=error.code, param=error.param) from None
        body: _T = errors.parse_body(model, raw)
        served.models.confirm(named, body.model)
        return body, tokenizer, context

    def tokenize_body(raw: bytes) -> Response:
        body, tokenizer, context = parse(TokenizeRequest, raw)
        tokens = _tokens(body, tokenizer)
        names = [_text(tokenizer, token) for token in tokens] if body.return_token_strs else None
        fields = {"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": names}
        return json_response(fields)

    def detokenize_body(raw: bytes) -> Response:
        body, tokenizer, _ = parse(DetokenizeRequest, raw)
        wrong = next((token for token in body.tokens if not 0 <= token < tokenizer.vocabulary_size), None)
        if wrong is not None:
            text = f"token {wrong} is outside the vocabulary of {tokenizer.vocabulary_size}"
            raise RequestError(text, param="tokens")
        return json_response({"prompt": tokenizer.decode(body.tokens, skip_special=False)})

    @app.post("/tokenize", **operation(TokenizeRequest, TokenizeResponse, statuses=_STATUSES))
    async def tokenize(request: Request) -> Response:
        return await served.do_with_body(request, tokenize_body)

    @app.get("/tokenizer_info", **operation(None, TokenizerInfo, statuses=(401, 404, 503)))
    async def tell_tokenizer(model: str | None = None) -> Response:
        tokenizer, context = served.models.require(model).require_ready()
        return json_response({**tokenizer.describe(), "model_max_length": context})

    @app.post("/detokenize", **operation(DetokenizeRequest, DetokenizeResponse, statuses=_STATUSES))
    async def detokenize(request: Request) -> Response:
        return await served.do_with_body(request, detokenize_body)


def _tokens(body: TokenizeRequest, tokenizer: Tokenizer) -> list[int]:
    if body.messages is not None:
        return chat_prompt(
            body.messages,
            tokenizer,
            body.tools,
            add_generation_prompt=body.add_generation_prompt,
            keywords=conversation.collect_keywords(body.reasoning_effort, body.chat_template_kwargs),
        )
    text = body.prompt or ""
    if body.add_special_tokens is False:
        return tokenizer.encode(text, special=True)
    return tokenizer.encode_prompt(text, special=True)


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")
