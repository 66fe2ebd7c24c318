"""Finds out what answers at an endpoint: which engine, which model, and what it can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import httpx

from orchestrator.worker.endpoint.client import (
    EndpointClient,
    HttpAnswer,
    ServerAway,
    describe_refusal,
    raise_refusal,
)
from orchestrator.worker.endpoint.dialects import (
    DIALECTS,
    GENERIC,
    LLAMA_SERVER,
    OLLAMA,
    OVMS,
    SGLANG,
    TGI,
    TRTLLM,
    VLLM,
    Dialect,
)

_OWNERS: Final = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "llamacpp": LLAMA_SERVER,
    "tensorrt_llm": TRTLLM,
    "OVMS": OVMS,
}
_TOKENIZE: Final = {**dict.fromkeys((VLLM, SGLANG, LLAMA_SERVER, TGI), "/tokenize"), OVMS: "/v3/tokenize"}
_HEALTH: Final = {VLLM: "/health", LLAMA_SERVER: "/health", OLLAMA: "/api/version", TGI: "/health"}
_TITLES: Final = {
    VLLM: "vLLM",
    SGLANG: "SGLang",
    LLAMA_SERVER: "llama-server",
    TRTLLM: "trtllm-serve",
    OLLAMA: "Ollama",
    OVMS: "OpenVINO Model Server",
    TGI: "TGI",
    GENERIC: "an engine that is not known",
}


class WrongServer(Exception):
    """What is there can never serve this target: the operator has to change something."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """`path`: where completions are asked for; `health`: what answers while the server works. `model`: the name to
    send. `identity`: another one where the build or the model is another. `context_tokens` and `slots`: 0 where that
    is not told. `tokenize`: the route that makes ids of text, "" for none. `takes_ids` and `gives_ids`: as the probe
    found."""

    dialect: Dialect
    path: str
    health: str
    model: str
    version: str
    identity: str
    context_tokens: int
    slots: int
    formats: str
    tokenize: str
    takes_ids: bool
    gives_ids: bool

    @property
    def title(self) -> str:
        """The engine and its version, for people."""
        return " ".join(filter(None, (_TITLES[self.dialect.engine], self.version)))


@dataclass(frozen=True, slots=True)
class ServedModels:
    """What a server lists. `api`: the path of its API; `entries`: of its models; `engine`: of DIALECTS."""

    api: str
    entries: tuple[Mapping[str, Any], ...]
    engine: str

    @property
    def title(self) -> str:
        """The engine, for people."""
        return _TITLES[self.engine]


async def list_served_models(client: EndpointClient, engine: str = "auto") -> ServedModels:
    """Ask which engine is there, and which models it lists. Raises as `find_server` does."""
    api, models = await _list_models(client)
    entries = [entry for entry in (models.body or {}).get("data") or () if isinstance(entry, dict)]
    engine = engine if engine != "auto" else await _find_engine(client, models, entries)
    return ServedModels(api, tuple(entries), engine)


async def find_server(client: EndpointClient, model: str, engine: str) -> ServerFacts:
    """Ask what is there. `model`: the name that the operator gives it, "" for the only one; `engine`: that they name,
    "auto" for none. Raises ServerAway, KeyRefused, WrongServer."""
    served = await list_served_models(client, engine)
    api, entries, engine = served.api, served.entries, served.engine
    entry = _choose_entry(entries, model, engine)
    name = model or str(entry.get("id", ""))
    dialect = DIALECTS[engine]
    facts = ServerFacts(
        dialect,
        path=dialect.path if dialect.path != "/completions" else f"{api}{dialect.path}",
        health=_HEALTH.get(engine, f"{api}/models"),
        model=name,
        version="",
        identity="",
        context_tokens=read_count(entry, "max_model_len"),
        slots=0,
        formats="",
        tokenize=_TOKENIZE.get(engine, ""),
        takes_ids=dialect.takes_ids,
        gives_ids=dialect.takes_ids,
    )
    facts = await _ASK_MORE.get(engine, _ask_nothing)(client, facts, entry)
    marks = (engine, facts.version, facts.model, entry.get("root", ""), facts.identity)
    return replace(facts, identity="\0".join(map(str, marks)))


async def _list_models(client: EndpointClient) -> tuple[str, HttpAnswer]:
    """Return the path of its API, and the models that it lists there."""
    for api in [client.api] if client.api else ["/v1", "/v3"]:
        answer = await client.get(f"{api}/models")
        if (
            answer.status == httpx.codes.OK
            and isinstance(answer.body, dict)
            and isinstance(answer.body.get("data"), list)
        ):
            return api, answer
        if answer.status == httpx.codes.SERVICE_UNAVAILABLE:
            raise ServerAway(f"it is loading: {describe_refusal(answer.text)}")
        if answer.status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise_refusal(answer.status, answer.text)
        if answer.status >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise ServerAway(f"HTTP {answer.status}: {describe_refusal(answer.text)}")
    raise WrongServer(
        f"no list of models is at {api}/models (HTTP {answer.status}), so no OpenAI-compatible server is there; "
        "write its address with the path of its API, as in http://gpu-box:8000/v1"
    )


async def _find_engine(client: EndpointClient, models: HttpAnswer, entries: Sequence[Mapping[str, Any]]) -> str:
    owners = {str(entry.get("owned_by", "")) for entry in entries}
    if known := next((engine for owner, engine in _OWNERS.items() if owner in owners), ""):
        return known
    if models.headers.get("server") == "llama.cpp" or any("n_ctx_train" in read_meta(entry) for entry in entries):
        return LLAMA_SERVER
    version = await client.get("/api/version")
    if version.status == httpx.codes.OK and "Ollama is running" in (await client.get("/")).text:
        return OLLAMA
    info = await client.get("/info")
    if isinstance(info.body, dict) and info.body.get("router") == "text-generation-router":
        return TGI
    about = await client.get("/v2")
    if isinstance(about.body, dict) and about.body.get("name") == "OpenVINO Model Server":
        return OVMS
    return GENERIC


def _choose_entry(entries: Sequence[Mapping[str, Any]], model: str, engine: str) -> Mapping[str, Any]:
    """Return what is told of a model. Raises WrongServer where the server has no such."""
    ids = {str(entry.get("id", "")): entry for entry in entries}
    if model in ids:
        return ids[model]
    if model and f"{model}:latest" in ids:
        return ids[f"{model}:latest"]
    if len(ids) == 1 and (not model or engine == LLAMA_SERVER):  # it serves its only model by any name
        return next(iter(ids.values()))
    names = ", ".join(map(repr, ids)) or "none"
    what = f"it has no model {model!r}" if model else "it has several models"
    raise WrongServer(f"{what}: name one of those that it has in `model`: {names}")


async def _ask_nothing(client: EndpointClient, facts: ServerFacts, entry: Mapping[str, Any]) -> ServerFacts:
    return facts


async def _ask_version(client: EndpointClient, facts: ServerFacts, entry: Mapping[str, Any]) -> ServerFacts:
    return replace(facts, version=_read_text(await client.get("/version"), "version"))


async def _ask_sglang(client: EndpointClient, facts: ServerFacts, entry: Mapping[str, Any]) -> ServerFacts:
    server, model = await client.get("/server_info"), await client.get("/model_info")
    identity = f"{_read_text(model, 'model_path')}\0{_read_text(model, 'weight_version')}"
    return replace(facts, version=_read_text(server, "version"), identity=identity)


async def _ask_llama(client: EndpointClient, facts: ServerFacts, entry: Mapping[str, Any]) -> ServerFacts:
    props = await client.get("/props")
    meta, body = read_meta(entry), props.body if isinstance(props.body, dict) else {}
    settings = body.get("default_generation_settings")
    context = read_count(settings if isinstance(settings, dict) else {}, "n_ctx") or read_count(meta, "n_ctx")
    return replace(
        facts,
        version=_read_text(props, "build_info"),
        identity=f"{body.get('model_path', '')}\0{meta.get('size', '')}\0{meta.get('n_params', '')}",
        context_tokens=context,
        slots=read_count(body, "total_slots"),
        formats=str(body.get("model_ftype") or meta.get("ftype") or ""),
    )


async def _ask_ollama(client: EndpointClient, facts: ServerFacts, entry: Mapping[str, Any]) -> ServerFacts:
    version, loaded, kept = [await client.get(path) for path in ("/api/version", "/api/ps", "/api/tags")]
    return replace(
        facts,
        version=_read_text(version, "version"),
        identity=str(_find_model(kept, facts.model).get("digest", "")),
        context_tokens=read_count(_find_model(loaded, facts.model), "context_length"),
    )


def _find_model(answer: HttpAnswer, name: str) -> Mapping[str, Any]:
    """Return what Ollama says of a model; {} where it does not have it there."""
    models = answer.body.get("models") or [] if isinstance(answer.body, dict) else []
    return next((model for model in models if model.get("name") in (name, f"{name}:latest")), {})


async def _ask_ovms(client: EndpointClient, facts: ServerFacts, entry: Mapping[str, Any]) -> ServerFacts:
    return replace(facts, version=_read_text(await client.get("/v2"), "version"))


async def _ask_tgi(client: EndpointClient, facts: ServerFacts, entry: Mapping[str, Any]) -> ServerFacts:
    info = await client.get("/info")
    body = info.body if isinstance(info.body, dict) else {}
    return replace(
        facts,
        version=_read_text(info, "version"),
        identity=f"{body.get('model_id', '')}\0{body.get('model_sha', '')}",
        context_tokens=read_count(body, "max_total_tokens"),
        slots=read_count(body, "max_concurrent_requests"),
        formats=str(body.get("model_dtype") or ""),
    )


_ASK_MORE: Final = {
    VLLM: _ask_version,
    TRTLLM: _ask_version,
    SGLANG: _ask_sglang,
    LLAMA_SERVER: _ask_llama,
    OLLAMA: _ask_ollama,
    OVMS: _ask_ovms,
    TGI: _ask_tgi,
}


def read_meta(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what llama-server says of a model's file."""
    meta = entry.get("meta")
    return meta if isinstance(meta, dict) else {}


def read_count(body: Mapping[str, Any], key: str) -> int:
    """Return a number of an answer; 0 where it has none that is one."""
    value = body.get(key)
    return value if isinstance(value, int) and value > 0 else 0


def _read_text(answer: HttpAnswer, key: str) -> str:
    return str(answer.body.get(key) or "") if isinstance(answer.body, dict) else ""
