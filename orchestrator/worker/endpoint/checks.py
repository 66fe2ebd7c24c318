"""Whether a server speaks the target's vocabulary, takes and gives token ids, and leaves a prompt as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import httpx

from adapters.tokenizer import Tokenizer
from orchestrator.protocol.commands import Submit
from orchestrator.worker.endpoint.client import EndpointClient, RequestRefused
from orchestrator.worker.endpoint.detection import ServerFacts, WrongServer
from orchestrator.worker.endpoint.dialects import LLAMA_SERVER, OVMS, TGI, Chunk, WireRequest
from orchestrator.worker.vocabulary_corpus import TEXTS

_PROBE: Final = "Count: one, two 🦜 three,"
# Not tuned: enough to have text and ids, and no load.
_PROBE_TOKENS: Final = 4
_BEGIN_TOKENS: Final = 1
"""That an engine may put before a text on its own."""


async def check_server(client: EndpointClient, facts: ServerFacts, tokenizer: Tokenizer) -> ServerFacts:
    """Return the facts as a short request shows them. Raises WrongServer where the server has another vocabulary, or
    does not leave a prompt as it is, and what requests raise."""
    if facts.tokenize:
        await _check_vocabulary(client, facts, tokenizer)
    return await _probe(client, facts, tokenizer)


async def _check_vocabulary(client: EndpointClient, facts: ServerFacts, tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        answer = await client.post(facts.tokenize, _ask_tokens(facts, text))
        if answer.status != httpx.codes.OK:
            return  # it has no such route: the probe has to do
        theirs, ours = _read_tokens(answer.body), tokenizer.encode(text, special=False)
        if theirs != ours:
            raise WrongServer(
                f"its vocabulary is another one: of {text!r} it makes {_shorten(theirs)}, and the target"
                f" {_shorten(ours)}; let it serve the model of `source`"
            )


def _ask_tokens(facts: ServerFacts, text: str) -> dict[str, Any]:
    engine = facts.dialect.engine
    if engine == LLAMA_SERVER:
        return {"content": text, "add_special": False}
    if engine == TGI:
        return {"inputs": text, "add_special_tokens": False}
    key = "text" if engine == OVMS else "prompt"
    return {"model": facts.model, key: text, "add_special_tokens": False}


def _read_tokens(body: Any) -> list[int]:
    tokens = body.get("tokens", []) if isinstance(body, dict) else body
    listed = tokens if isinstance(tokens, list) else []
    return [token.get("id", -1) if isinstance(token, dict) else token for token in listed]


def _shorten(ids: Sequence[int]) -> str:
    return f"{list(ids[:8])}{' and so on' if len(ids) > 8 else ''}"


async def _probe(client: EndpointClient, facts: ServerFacts, tokenizer: Tokenizer) -> ServerFacts:
    ids = tokenizer.encode_prompt(_PROBE, special=False)
    if facts.takes_ids:
        try:
            chunks = await _request(client, facts, ids)
        except RequestRefused:
            return await _probe(client, replace(facts, takes_ids=False), tokenizer)
        _check_count(chunks, len(ids), len(ids))
        gives = all(chunk.tokens is not None for chunk in chunks if chunk.text)
        answer = [token for chunk in chunks for token in chunk.tokens or ()]
        if gives and not all(0 <= token < tokenizer.vocabulary_size for token in answer):
            raise WrongServer(f"it gives token ids outside the target's vocabulary: {_shorten(answer)}")
        return replace(facts, gives_ids=gives)
    chunks = await _request(client, facts, _PROBE)
    _check_count(chunks, 0, len(tokenizer.encode(_PROBE, special=False)) + _BEGIN_TOKENS)
    return replace(facts, gives_ids=False)


async def _request(client: EndpointClient, facts: ServerFacts, prompt: Sequence[int] | str) -> list[Chunk]:
    submit = Submit("probe", [], _PROBE_TOKENS)
    body = facts.dialect.build(WireRequest(submit, prompt, _PROBE_TOKENS, 0, ignore_eos=False), facts.model)
    chunks = []
    async for line in client.stream_lines(facts.path, body):
        if (chunk := facts.dialect.read_line(line)) is not None:
            chunks.append(chunk)
    return chunks


def _check_count(chunks: Sequence[Chunk], least: int, most: int) -> None:
    counts = [chunk.prompt_tokens for chunk in chunks if chunk.prompt_tokens >= 0]
    if counts and not least <= counts[-1] <= most:
        raise WrongServer(
            f"it makes {counts[-1]} tokens of a prompt of {most}: it cuts it, or puts a template or other tokens around"
            " it; switch that off there"
        )
