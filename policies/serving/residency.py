"""Which models are in memory where not all of them fit: what is loaded next, and what gives way for it.

One model is loaded at a time, for whoever has waited longest. Among models that may go, those that have rested for a
while go first, then the least used; of several that would do, one is enough. A moment without a request is no rest: a
model in steady use has many. A model with requests gives way only where somebody has waited for as long as a load
takes, within bounds: so it has had about half of the time, and whoever waits has a turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

Keep = Literal["always", "while_used", "on_demand"]
"""When a model is in memory: always, from the start until its room or its rest is wanted, or from its first request."""

# Without a request for so long a model gives way before those that are used less, and have some. Not tuned: between two
# requests of a model that is in use there is less.
REST_S: Final = 10.0
# A request waits so long at least before a model with requests gives way. Not tuned; a simulated load takes less.
PATIENCE_S: Final = 2.0
# And no longer than this, however long loads take. Not tuned: clients' own limits are often a minute.
MOST_PATIENCE_S: Final = 30.0


class ModelStage(Enum):
    """Of a model. One that leaves takes no new request, and is unloaded once those that it has have ended. One that has
    failed is never loaded as it is."""

    UNLOADED = "not loaded"
    LOADING = "loading"
    LOADED = "loaded"
    LEAVING = "leaving"
    UNLOADING = "unloading"
    FAILED = "failed"


_AWAY: Final = (ModelStage.UNLOADED, ModelStage.FAILED)
_GOING: Final = (ModelStage.LEAVING, ModelStage.UNLOADING)


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """A model now. `needs`: bytes by device, as far as they are known. `live`: requests that it has, or that are about
    to come to it. `waiting`: those that wait for it to be loaded, the oldest for `waits_s`. It has had none for
    `idle_s`, and is unloaded when that is `unload_after_s`. `use`: requests of late. `load_s`: how long its last load
    took. `first_load`: it is to be loaded without a request, once there is room."""

    keep: Keep
    stage: ModelStage
    needs: Mapping[str, int]
    live: int = 0
    waiting: int = 0
    waits_s: float = 0.0
    idle_s: float = 0.0
    unload_after_s: float = float("inf")
    use: float = 0.0
    load_s: float = 0.0
    first_load: bool = False


@dataclass(frozen=True, slots=True)
class ResidencySteps:
    """By the models' places: `load` (None: none), `unload` for rest (None) or for another model's room (its place), and
    `keep`: those that were to leave and need not. `look_s`: when to look again, where time alone may change this."""

    load: int | None = None
    unload: tuple[tuple[int, int | None], ...] = ()
    keep: tuple[int, ...] = ()
    look_s: float | None = None


def choose_steps(models: Sequence[ModelDemand], memory: Mapping[str, int]) -> ResidencySteps:
    """Return what to do now. `memory`: bytes that models may take, by device; one that is not there bounds nothing."""
    resting = [number for number, model in enumerate(models) if _may_go(model) and not model.live]
    idle = tuple((number, None) for number in resting if models[number].idle_s >= models[number].unload_after_s)
    looks = [models[number].unload_after_s - models[number].idle_s for number in resting if (number, None) not in idle]
    wanted = _find_first(models)
    leaving = tuple(number for number, model in enumerate(models) if model.stage is ModelStage.LEAVING)
    if wanted is None:
        return ResidencySteps(None, idle, leaving, _soonest(looks))
    if any(model.stage is ModelStage.LOADING for model in models):
        return ResidencySteps(None, idle, (), _soonest(looks))
    lacking = _find_lacking(models, wanted, memory)
    if not lacking:
        return ResidencySteps(wanted, idle, (), _soonest(looks))
    going = [number for number, model in enumerate(models) if model.stage in _GOING] + [number for number, _ in idle]
    if _suffices(models, going, lacking):
        return ResidencySteps(None, idle, (), _soonest(looks))
    more, wait_s = _choose_victims(models, wanted, going, lacking)
    unload = (*idle, *((number, wanted) for number in more))
    return ResidencySteps(None, unload, (), _soonest([*looks, *([] if wait_s is None else [wait_s])]))


@dataclass(frozen=True, slots=True)
class Misfit:
    """Models, by their places, that a device cannot hold together, though they have to be there together."""

    device: str
    models: tuple[int, ...]
    needed_bytes: int
    memory_bytes: int


def find_misfit(needs: Sequence[Mapping[str, int]], pinned: Iterable[int], memory: Mapping[str, int]) -> Misfit | None:
    """Return why models cannot all have their place in turn: the `pinned` ones together, or another one beside them.
    None where each can."""
    kept = list(pinned)
    for number in [None, *(number for number in range(len(needs)) if number not in kept)]:
        together = (*kept, *(() if number is None else (number,)))
        for device, most in memory.items():
            if (needed := sum(needs[each].get(device, 0) for each in together)) > most:
                return Misfit(device, tuple(each for each in together if needs[each].get(device)), needed, most)
    return None


def _find_first(models: Sequence[ModelDemand]) -> int | None:
    """Return the model that is loaded next: the one that is waited for longest, else one that nobody waits for yet and
    that there is room for."""
    unloaded = [number for number, model in enumerate(models) if model.stage is ModelStage.UNLOADED]
    waited = [number for number in unloaded if models[number].waiting]
    if waited:
        return max(waited, key=lambda number: (models[number].waits_s, -number))
    return next((number for number in unloaded if models[number].first_load), None)


def _may_go(model: ModelDemand) -> bool:
    return model.stage is ModelStage.LOADED and model.keep != "always"


def _find_lacking(models: Sequence[ModelDemand], wanted: int, memory: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes, by device, by which the free memory is too small for a model."""
    lacking = {}
    for device, need in models[wanted].needs.items():
        taken = sum(model.needs.get(device, 0) for model in models if model.stage not in _AWAY)
        if device in memory and (more := taken + need - memory[device]) > 0:
            lacking[device] = more
    return lacking


def _suffices(models: Sequence[ModelDemand], gone: Sequence[int], lacking: Mapping[str, int]) -> bool:
    return all(sum(models[number].needs.get(device, 0) for number in gone) >= more for device, more in lacking.items())


def _choose_victims(
    models: Sequence[ModelDemand], wanted: int, going: Sequence[int], lacking: Mapping[str, int]
) -> tuple[list[int], float | None]:
    """Return what gives way beside those that go already, and in how many seconds more may."""
    if not models[wanted].waiting:
        return [], None  # it is loaded where there is room
    able = [number for number, model in enumerate(models) if _may_go(model) and number not in going]
    able.sort(key=lambda number: (not _rests(models[number]), models[number].use, -models[number].idle_s))
    chosen = next(([number] for number in able if _suffices(models, [*going, number], lacking)), None)
    if chosen is None:
        chosen = _leave_out_spare(models, going, able, lacking)
    wait_s = min(MOST_PATIENCE_S, max(PATIENCE_S, models[wanted].load_s)) - models[wanted].waits_s
    if wait_s > 0.0 and any(models[number].live for number in chosen):
        return [], wait_s
    return chosen, None


def _rests(model: ModelDemand) -> bool:
    return not model.live and model.idle_s >= REST_S


def _leave_out_spare(
    models: Sequence[ModelDemand], going: Sequence[int], chosen: Sequence[int], lacking: Mapping[str, int]
) -> list[int]:
    """Return those of the chosen that are needed, the most used left out first; none where all are not enough."""
    if not _suffices(models, [*going, *chosen], lacking):
        return []
    needed = list(chosen)
    for number in reversed(chosen):
        rest = [other for other in needed if other != number]
        if _suffices(models, [*going, *rest], lacking):
            needed = rest
    return needed


def _soonest(looks: Iterable[float]) -> float | None:
    return min((look for look in looks if look != float("inf")), default=None)
