"""All models of a daemon: which of them are used how much, and what follows for which are in memory. No effects."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.daemon.control.replicas.residency import ResidencyTerms
from policies.serving.residency import ModelDemand, ModelStage, ResidencySteps, choose_steps

# After so long a request counts half of one that comes now. Not tuned: longer than a pause between two conversations.
USE_HALVED_S = 600.0


@dataclass(frozen=True, slots=True)
class SeenModel:
    """A model as its control has it. `live`: its requests and those that are about to come to it; `waiting`: those of
    them that wait for it to be loaded; `arrived`: all that ever came."""

    stage: ModelStage
    live: int
    waiting: int
    arrived: int
    load_s: float = 0.0


@dataclass(slots=True)
class _Model:
    terms: ResidencyTerms
    first_load: bool
    use: float = 0.0
    used_s: float = 0.0
    arrived: int = 0
    waits_since_s: float | None = None


class Roster:
    """Folds what is seen of the models, which are always in the same order, into what is to be done. `memory`: bytes
    that models may take, by device. Those `at_start` are loaded without a request, as far as there is room."""

    def __init__(
        self, terms: Sequence[ResidencyTerms], memory: Mapping[str, int], at_start: Collection[int], now_s: float
    ) -> None:
        self._memory = memory
        self._models = [_Model(each, number in at_start, used_s=now_s) for number, each in enumerate(terms)]

    def decide_steps(self, seen: Sequence[SeenModel], now_s: float) -> ResidencySteps:
        demands = [self._fold(model, each, now_s) for model, each in zip(self._models, seen, strict=True)]
        return choose_steps(demands, self._memory)

    def _fold(self, model: _Model, seen: SeenModel, now_s: float) -> ModelDemand:
        if seen.live or seen.arrived > model.arrived:
            model.use *= 0.5 ** ((now_s - model.used_s) / USE_HALVED_S)
            model.use += seen.arrived - model.arrived
            model.used_s, model.arrived = now_s, seen.arrived
        if not seen.waiting:
            model.waits_since_s = None
        elif model.waits_since_s is None:
            model.waits_since_s = now_s
        if seen.stage is not ModelStage.UNLOADED:
            model.first_load = False
        idle_s = now_s - model.used_s
        return ModelDemand(
            model.terms.keep,
            seen.stage,
            model.terms.needs,
            seen.live,
            seen.waiting,
            0.0 if model.waits_since_s is None else now_s - model.waits_since_s,
            idle_s,
            model.terms.idle_s,
            model.use * 0.5 ** (idle_s / USE_HALVED_S),
            seen.load_s,
            model.first_load,
        )
