"""The admin route of a reload: what changes in cluster.yaml, and that it takes effect."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True, slots=True)
class ReloadPort:
    """What the route asks of the daemon. `reload` takes whether it only says what would change; it raises RequestError.
    `describe`: how what runs stands to the file. `list_values`: what runs, by key, and the keys that flags set."""

    reload: Callable[[bool], Awaitable[dict[str, Any]]]
    describe: Callable[[], dict[str, Any]]
    list_values: Callable[[], dict[str, Any]]


class ReloadRequest(BaseModel):
    """What a command asks for. `check`: say what would change, and change nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)
    check: bool = False


def install_reload_route(app: FastAPI, port: ReloadPort) -> None:

    @app.post("/admin/reload")
    async def reload(body: ReloadRequest) -> dict[str, Any]:
        return await port.reload(body.check)

    @app.get("/admin/configuration")
    async def configuration() -> dict[str, Any]:
        return port.list_values()
