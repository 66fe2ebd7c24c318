"""The targets that admin routes are about: all, or the one that is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from device_profiles.device_names import name_compute_place
from orchestrator.daemon.api.translate import AcceptanceBounds
from orchestrator.daemon.control.operator_desk import OperatorDesk
from orchestrator.daemon.control.port import Control
from orchestrator.daemon.control.rollout.canary import CanaryTrial
from orchestrator.errors import RequestError


class AdminBody(BaseModel):
    """What an admin route is asked. `model`: whose; left out: of every model."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None


class AdminControl(Control, Protocol):
    """Control, and what only the operator may ask of it."""

    @property
    def steering(self) -> OperatorDesk: ...


@dataclass(frozen=True, slots=True, eq=False)
class AdminTarget:
    """One target. `bounds`: the rules that its requests may ask for. `running_plan`: as plain data; `slo`: how requests
    meet their objectives; `costs`: what the devices in use cost; `hosts`: those that plans are made for. `trial`: of
    the canary; `speed`: what came out of late."""

    control: AdminControl
    name: Callable[[], str] = str
    bounds: Callable[[], AcceptanceBounds] = AcceptanceBounds
    running_plan: Callable[[], dict[str, Any] | None] = lambda: None
    slo: Callable[[], dict[str, Any] | None] = lambda: None
    costs: Callable[[], dict[str, Any] | None] = lambda: None
    hosts: Callable[[], list[dict[str, Any]]] = list
    trial: CanaryTrial | None = None
    speed: Callable[[], dict[str, Any] | None] = lambda: None


class AdminTargets:
    def __init__(self, targets: Sequence[AdminTarget]) -> None:
        self._targets = tuple(targets)

    def __iter__(self) -> Iterator[AdminTarget]:
        return iter(self._targets)

    @property
    def first(self) -> AdminTarget:
        """The one of requests that name no model."""
        return self._targets[0]

    @property
    def several(self) -> bool:
        return len(self._targets) > 1

    def choose(self, model: str | None) -> Sequence[AdminTarget]:
        """Return the target of that name, or all. Raises RequestError 404."""
        matches = [target for target in self._targets if model in (None, target.name())]
        if not matches:
            names = " and ".join(repr(target.name()) for target in self._targets)
            text = f"there is no model '{model}' here; there is {names}"
            raise RequestError(text, status=404, code="model_not_found", param="model")
        return matches

    def choose_one(self, model: str | None, what: str) -> AdminTarget:
        """Return the target of that name, or the only one. Raises RequestError 404, and 400 where none is named."""
        matches = self.choose(model)
        if len(matches) > 1:
            names = ", ".join(target.name() for target in matches)
            text = f"{what} is of one model: say which with --model ({names})"
            raise RequestError(text, code="model_missing", param="model")
        return matches[0]

    def label(self, target: AdminTarget) -> dict[str, str]:
        """Return what tells a target's entries from those of others, where there are others."""
        return {"model": target.name()} if self.several else {}


_ONLY, _FIRST = "target", "target-0"
"""What the first replica is called, where it is the only one and where there may be others."""


def spell_worker(targets: Sequence[AdminTarget], name: str) -> str:
    """Return what a worker is called here: who means the first replica may use either of its names."""
    other = {_ONLY: _FIRST, _FIRST: _ONLY}.get(name)
    parts = [part for target in targets for part in target.control.steering.list_parts()]
    workers = {part.name for part in parts if part.kind == "worker"}
    return other if other in workers and name not in workers else name


def spell_device(targets: Sequence[AdminTarget], name: str) -> str:
    """Return what a device is called here, "HOST/DEVICE", by any of its spellings. Other names stay as they are."""
    parts = [part for target in targets for part in target.control.steering.list_parts()]
    devices = {name_compute_place(part.name): part.name for part in parts if part.kind == "device"}
    return devices.get(name_compute_place(name), name)
