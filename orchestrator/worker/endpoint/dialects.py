"""How each engine is asked for tokens, and how its answer reads. No I/O.

Fields are those of the engines' documentation; every one that has a default at the server is sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from orchestrator.protocol.commands import Grammar, Submit
from orchestrator.worker.endpoint.client import StreamLost, describe_refusal, raise_refusal

LLAMA_SERVER, OLLAMA, VLLM, SGLANG, TRTLLM, OVMS = "llama_server", "ollama", "vllm", "sglang", "trtllm", "ovms"
TGI, GENERIC = "tgi", "generic"
_DONE: Final = "[DONE]"
# Of a seed: OpenVINO Model Server takes no longer ones.
_SEED_BITS: Final = 0xFFFFFFFF
_BY_POSITION: Final = (VLLM, SGLANG)
"""Engines whose draws depend on the seed and the position, so that a request that goes on keeps its seed."""


@dataclass(frozen=True, slots=True)
class WireRequest:
    """What is left of a request. `prompt`: all tokens before the next one, or their text where the engine takes
    no ids. `ignore_eos`: the model's own end is no end."""

    submit: Submit
    prompt: Sequence[int] | str
    max_tokens: int
    done: int
    """Tokens of the answer that are in `prompt`."""
    ignore_eos: bool

    def find_seed(self, engine: str) -> int:
        """Return the seed to send: another one where a request goes on whose draws would begin anew."""
        moved = 0 if engine in _BY_POSITION else self.done
        return (self.submit.sampling.seed + moved) & _SEED_BITS


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer. `tokens`: None where the engine gives no ids. `predicted`: how many tokens there are so
    far, below 0 where that is not told. `finish`: "stop" or "length" with the last one."""

    text: str = ""
    tokens: Sequence[int] | None = None
    predicted: int = -1
    finish: str = ""
    prompt_tokens: int = -1
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one engine is spoken to. `path`: behind the server's address. `cannot`: what a request may ask for and this
    engine does not do. `grammars`: the kinds that it follows."""

    engine: str
    path: str
    build: Callable[[WireRequest, str], dict[str, Any]]
    parse: Callable[[Mapping[str, Any]], Chunk]
    takes_ids: bool
    cannot: frozenset[str]
    grammars: frozenset[str] = frozenset()

    def read_line(self, line: str) -> Chunk | None:
        """Return what a line of an answer says; None where it says nothing. Raises StreamLost, and what `raise_refusal`
        does where it is an error."""
        text = line.removeprefix("data:").strip()
        if not text or line.startswith((":", "event:", "id:", "retry:")) or text == _DONE:
            return None
        try:
            body = json.loads(text)
        except ValueError as error:
            raise StreamLost(f"its answer is no JSON: {text[:80]!r}") from error
        if not isinstance(body, dict):
            raise StreamLost(f"its answer is no object: {text[:80]!r}")
        if "error" in body and not body.get("choices"):
            error_body = body["error"]
            status = next((error_body[key] for key in ("code", "http_status_code") if _is_status(error_body, key)), 500)
            raise_refusal(status, describe_refusal(text))
        return self.parse(body)


def _is_status(body: object, key: str) -> bool:
    return isinstance(body, dict) and isinstance(body.get(key), int) and 400 <= body[key] < 600


def _name_limits(request: WireRequest, engine: str) -> dict[str, Any]:
    sampling = request.submit.sampling
    return {
        "max_tokens": request.max_tokens,
        "stream": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": request.find_seed(engine),
    }


def _build_body(request: WireRequest, name: str, engine: str) -> dict[str, Any]:
    """Return what most engines take by the same names."""
    sampling = request.submit.sampling
    return {
        "model": name,
        "prompt": request.prompt,
        **_name_limits(request, engine),
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_p": sampling.min_p,
        "stream_options": {"include_usage": True},
    }


def _name_biases(request: WireRequest) -> dict[str, Any]:
    biases = request.submit.sampling.logit_bias
    return {"logit_bias": {str(token): bias for token, bias in biases}} if biases else {}


def _name_ends(request: WireRequest) -> dict[str, Any]:
    least = max(0, request.submit.min_tokens - request.done)
    return {"ignore_eos": request.ignore_eos, "min_tokens": least, "stop_token_ids": list(request.submit.stop_tokens)}


def _build_vllm(request: WireRequest, name: str) -> dict[str, Any]:
    body = _build_body(request, name, VLLM) | {"top_k": request.submit.sampling.top_k or -1}
    body |= {"return_token_ids": True, "skip_special_tokens": False, "add_special_tokens": False}
    grammar = request.submit.grammar
    if grammar is not None:
        body["structured_outputs"] = _name_schema(grammar, "json", "regex", as_text=False)
    return body | _name_ends(request) | _name_biases(request)


def _build_sglang(request: WireRequest, name: str) -> dict[str, Any]:
    body = _build_body(request, name, SGLANG) | {"top_k": request.submit.sampling.top_k or -1}
    body |= {"return_token_ids": True, "skip_special_tokens": False}
    if request.submit.grammar is not None:
        body |= _name_schema(request.submit.grammar, "json_schema", "regex", as_text=True)
    return body | _name_ends(request) | _name_biases(request)


def _build_trtllm(request: WireRequest, name: str) -> dict[str, Any]:
    body = _build_body(request, name, TRTLLM)  # one with any field but these is refused
    body |= {"top_k": request.submit.sampling.top_k, "detokenize": False, "add_special_tokens": False}
    return body | _name_ends(request) | _name_biases(request)


def _build_ovms(request: WireRequest, name: str) -> dict[str, Any]:
    top_k = request.submit.sampling.top_k
    return _build_body(request, name, OVMS) | {"ignore_eos": request.ignore_eos} | ({"top_k": top_k} if top_k else {})


def _build_generic(request: WireRequest, name: str) -> dict[str, Any]:
    return {"model": name, "prompt": request.prompt, **_name_limits(request, GENERIC)}


def _read_choice(body: Mapping[str, Any]) -> Chunk:
    """Read a chunk of OpenAI's completions, with the ids that vLLM, SGLang and trtllm-serve add."""
    usage = body.get("usage") or {}
    prompt_tokens = usage.get("prompt_tokens", -1) or -1
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    choice = next(iter(body.get("choices") or ()), None)
    if choice is None:
        return Chunk(prompt_tokens=prompt_tokens, cached_tokens=cached)
    finish = choice.get("finish_reason") or ""
    if finish not in ("", "stop", "length", "eos_token", "stop_sequence"):
        raise StreamLost(f"it ended an answer as {finish!r}")
    finish = finish if finish in ("", "length") else "stop"
    tokens = choice.get("token_ids")
    return Chunk(choice.get("text") or "", tokens, -1, finish, prompt_tokens, cached)


def _build_llama(request: WireRequest, name: str) -> dict[str, Any]:
    sampling = request.submit.sampling
    body: dict[str, Any] = {
        **({"model": name} if name else {}),
        "prompt": request.prompt,
        "n_predict": request.max_tokens,
        "stream": True,
        "return_tokens": True,
        "cache_prompt": True,
        "samplers": ["temperature", "min_p", "top_k", "top_p"],
        "temperature": sampling.temperature,
        "top_k": sampling.top_k if sampling.temperature else 1,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": request.find_seed(LLAMA_SERVER),
        "stop": [],
        "ignore_eos": request.ignore_eos,
        "logit_bias": [[token, bias] for token, bias in sampling.logit_bias],
    }
    if request.submit.grammar is not None:
        body |= _name_schema(request.submit.grammar, "json_schema", "", as_text=False)
    return body


def _read_llama(body: Mapping[str, Any]) -> Chunk:
    if "prompt_progress" in body:
        return Chunk()
    stop = body.get("stop", False)
    ends = {"limit": "length"}.get(body.get("stop_type", ""), "stop")
    return Chunk(
        body.get("content", ""),
        body.get("tokens") or [],
        body.get("tokens_predicted", -1),
        ends if stop else "",
        body.get("tokens_evaluated", -1),
        (body.get("timings") or {}).get("cache_n", 0),
    )


def _build_ollama(request: WireRequest, name: str) -> dict[str, Any]:
    sampling = request.submit.sampling
    options = {
        "num_predict": request.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": 1.0,
        "seed": request.find_seed(OLLAMA),
        "stop": [],
    }
    whole = {"raw": True, "stream": True, "truncate": False, "shift": False}
    return {"model": name, "prompt": request.prompt, **whole, "options": options}


def _read_ollama(body: Mapping[str, Any]) -> Chunk:
    finish = (body.get("done_reason") or "stop") if body.get("done") else ""
    return Chunk(body.get("response", ""), None, -1, finish, body.get("prompt_eval_count", -1))


def _name_schema(grammar: Grammar, json_field: str, regex_field: str, *, as_text: bool) -> dict[str, Any]:
    if grammar.kind == "regex":
        return {regex_field: grammar.text}
    return {json_field: grammar.text if as_text else json.loads(grammar.text)}


_SCORES: Final = frozenset({"logprobs", "prompt_logprobs"})
_PENALTIES: Final = frozenset({"frequency_penalty", "presence_penalty", "repetition_penalty"})
_EXACT_ENDS: Final = frozenset({"min_tokens", "logit_bias"})

_DIALECTS: Final[Collection[Dialect]] = (
    Dialect(VLLM, "/v1/completions", _build_vllm, _read_choice, True, _SCORES, frozenset({"json_schema", "regex"})),
    Dialect(SGLANG, "/v1/completions", _build_sglang, _read_choice, True, _SCORES, frozenset({"json_schema", "regex"})),
    Dialect(TRTLLM, "/v1/completions", _build_trtllm, _read_choice, True, _SCORES),
    Dialect(
        *(LLAMA_SERVER, "/completion", _build_llama, _read_llama, True),
        _SCORES | _PENALTIES | {"min_tokens"},
        frozenset({"json_schema"}),
    ),
    Dialect(
        *(OLLAMA, "/api/generate", _build_ollama, _read_ollama, False),
        _SCORES | _PENALTIES | _EXACT_ENDS | {"ignore_eos"},
    ),
    Dialect(OVMS, "/completions", _build_ovms, _read_choice, False, _SCORES | _EXACT_ENDS),
    Dialect(
        *(TGI, "/v1/completions", _build_generic, _read_choice, False),
        _SCORES | _PENALTIES | _EXACT_ENDS | {"ignore_eos", "top_k", "min_p"},
    ),
    Dialect(
        *(GENERIC, "/completions", _build_generic, _read_choice, False),
        _SCORES | _PENALTIES | _EXACT_ENDS | {"ignore_eos", "top_k", "min_p"},
    ),
)
DIALECTS: Final[Mapping[str, Dialect]] = {dialect.engine: dialect for dialect in _DIALECTS}
