"""Servers of other engines, here and on other machines, and which of the models here each of them has loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from adapters.contract import ModelRefused
from adapters.gguf_splits import read_model_header
from adapters.hf_hub import HUB_PREFIX, parse_id
from adapters.local_models import OLLAMA, LocalModel
from orchestrator.worker.endpoint import dialects
from orchestrator.worker.endpoint.client import EndpointClient, ServerError
from orchestrator.worker.endpoint.detection import (
    ServedModels,
    WrongServer,
    find_server,
    list_served_models,
    read_count,
    read_meta,
)

USUAL_PORTS: Final = {8080: "llama-server", 11434: "Ollama", 8000: "vLLM"}
"""What these engines listen on where nobody says otherwise."""
_HTTP_PORT: Final = 80  # of an address without one
_OWN: Final = "outrider"
_TITLE: Final = "Outrider"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a server lists. `name`: to send; `model`: the same files here, None where there are none that are
    known to be so; `parameters`: 0 where the server does not tell."""

    name: str
    model: LocalModel | None
    parameters: int = 0


@dataclass(frozen=True, slots=True)
class LocalServer:
    """What answers at an address. `title`: the engine and its version; `context_tokens` and `slots`: 0 where it does
    not tell. `problem`: why it cannot be a member of a pool, "" where one of its models can be. `engine`: of
    dialects.py, "" where that is not known; `key_file`: has the key that it is asked with, "" for none."""

    url: str
    title: str
    models: tuple[ServedModel, ...] = ()
    context_tokens: int = 0
    slots: int = 0
    problem: str = ""
    engine: str = ""
    key_file: str = ""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or _HTTP_PORT

    @property
    def members(self) -> tuple[ServedModel, ...]:
        """Return the models with which it can be a member of a pool."""
        return () if self.problem else tuple(served for served in self.models if served.model is not None)


def list_usual_urls(hosts: Sequence[str]) -> list[str]:
    """Return where engines listen on hosts by default."""
    return [f"http://{f'[{host}]' if ':' in host else host}:{port}" for host in hosts for port in USUAL_PORTS]


def list_urls(place: str) -> list[str]:
    """Return where a server may listen: a URL is one, HOST:PORT is one, and HOST alone has the usual ports. Raises
    ValueError."""
    is_bare_address = "://" not in place and place.count(":") > 1 and not place.startswith("[")
    url = httpx.URL(place if "://" in place else f"http://[{place}]" if is_bare_address else f"http://{place}")
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError("it has no host, or another scheme than http and https")
    if "://" in place or urlsplit(str(url)).port is not None:  # which refuses a port beyond 65535
        return [str(url).rstrip("/")]
    return list_usual_urls([url.host])


def find_servers(
    urls: Sequence[str], models: Sequence[LocalModel], named: Sequence[str] = (), key_file: str = ""
) -> list[LocalServer]:
    """Ask what answers at these addresses. What serves no models is left out, unless its address is `named`; one that
    loads, or wants another key than that in `key_file`, is told of. Raises OSError where the key cannot be read."""

    async def ask() -> list[LocalServer | None]:
        every = dict.fromkeys([*named, *urls])
        return await asyncio.gather(*(_find_server(url, models, key_file, must_answer=url in named) for url in every))

    return [server for server in asyncio.run(ask()) if server is not None]


async def _find_server(
    url: str, models: Sequence[LocalModel], key_file: str, *, must_answer: bool
) -> LocalServer | None:
    client = EndpointClient(url, key_file)
    try:
        served = await list_served_models(client)
        if any(entry.get("owned_by") == _OWN for entry in served.entries):
            names = tuple(ServedModel(str(entry.get("id", "")), None) for entry in served.entries)
            return LocalServer(url, _TITLE, names, problem="it is an Outrider daemon by itself")
        return await _describe(client, url, served, models)
    except (ServerError, WrongServer) as error:
        is_none = isinstance(error, WrongServer) or isinstance(error.__cause__, httpx.HTTPError)
        return None if is_none and not must_answer else LocalServer(url, "", problem=str(error))
    finally:
        await client.close()


async def _describe(
    client: EndpointClient, url: str, served: ServedModels, models: Sequence[LocalModel]
) -> LocalServer:
    names = [str(entry.get("id", "")) for entry in served.entries]
    if not names:
        return LocalServer(url, served.title, problem="it has no model")
    facts = await find_server(client, names[0], served.engine)
    file = await _read_model_path(client) if served.engine == dialects.LLAMA_SERVER else ""
    listed = []
    for name, entry in zip(names, served.entries, strict=True):
        marks = {name, str(entry.get("root") or name), file} - {""}
        meta = read_meta(entry)
        weights_bytes = read_count(meta, "size")
        same = (model for model in models if _is_same(served, model, marks) or _is_copy(model, marks, weights_bytes))
        listed.append(ServedModel(name, next(same, None), read_count(meta, "n_params")))
    problem = (
        "" if any(served.model for served in listed) else "none of its models is known to be one of the files here"
    )
    return LocalServer(
        url, facts.title, tuple(listed), facts.context_tokens, facts.slots, problem, served.engine, client.key_file
    )


async def _read_model_path(client: EndpointClient) -> str:
    body: Any = (await client.get("/props")).body
    return str(body.get("model_path") or "") if isinstance(body, dict) else ""


def _is_same(served: ServedModels, model: LocalModel, marks: set[str]) -> bool:
    """Return whether a model here is what a server calls by one of these marks: its file, or its name at the same hub.
    Names alone say nothing of files, so others are not taken."""
    if served.engine == dialects.OLLAMA:
        return model.place == OLLAMA and model.name in marks
    if any(mark.startswith("/") and Path(mark).resolve() == model.path.resolve() for mark in marks):
        return True
    return model.source.startswith(HUB_PREFIX) and not (hub := parse_id(model.source)).file and hub.repo in marks


def _is_copy(model: LocalModel, marks: set[str], weights_bytes: int) -> bool:
    """Return whether a llama-server on another machine has a file of the same name, whatever writes its paths, with
    weights of the same size to the byte: those of another quantisation have another."""
    if not weights_bytes or model.path.name not in {mark.replace("\\", "/").rpartition("/")[2] for mark in marks}:
        return False
    try:
        return sum(tensor.size for tensor in read_model_header(model.path).tensors) == weights_bytes
    except (OSError, ModelRefused):
        return False
