"""The models behind the endpoint: what serves each, whether its decoding goes on, and which a request is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from adapters.tokenizer import Tokenizer
from orchestrator.clock import Clock
from orchestrator.daemon.api.metrics.collector import Metrics
from orchestrator.daemon.api.metrics.goodput_series import NO_PRICE, HourlyPrice
from orchestrator.daemon.api.translate import AcceptanceBounds
from orchestrator.daemon.batches.lines import BatchLine
from orchestrator.daemon.control.loops.model_roster import ModelGate
from orchestrator.daemon.control.port import Control
from orchestrator.daemon.control.rollout.canary import CanaryTrial
from orchestrator.daemon.control.state import FAILED, READY, STARTING, UNLOADED
from orchestrator.daemon.control.streams.admission import describe_held
from orchestrator.errors import RequestError
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import RoundReport
from policies.serving.slo import NO_OBJECTIVES, Objectives

Verdict = Literal["ok", "idle", "stalled"]
# While models load: what a client may ask again after. Not tuned.
NOT_READY_RETRY_S = 5
_DECODES = ("loaded", "leaving")
"""The states of a model that comes and goes in which requests are decoded."""
_LOADED_FIRST = (UNLOADED, STARTING)
"""The phases of a model in which a request that loads it waits."""


@dataclass(slots=True)
class Liveness:
    """Watches the rounds of the decode loop: a server that answers probes and makes no token is not healthy.

    "idle": no request is live. "stalled": requests are live and no round was finished for `stalled_after_s`. The reason
    may be a worker that hangs, or one that is being restarted for too long. It is "stalled" too where one of several
    replicas has had requests for so long and said nothing. Else "ok", also while requests wait for their model to be
    loaded. Long prefills are rounds too, so a busy server is not taken for a stalled one.
    """

    control: Control
    clock: Clock
    stalled_after_s: float
    _token_s: float | None = None
    _round_s: float | None = None
    _busy_s: float | None = None

    def observe_round(self, done: RoundReport) -> None:
        self._round_s = self.clock.monotonic_s()
        if any(delta.tokens for delta in done.deltas):
            self._token_s = self._round_s

    def observe_request(self) -> None:
        """A request is about to be taken in. Waiting begins here when nothing else was live."""
        if self.control.view().streams == 0:
            self._busy_s = self.clock.monotonic_s()

    def verdict(self) -> Verdict:
        view = self.control.view()
        if view.streams == 0:
            return "idle"
        if view.residency is not None and view.residency.state not in _DECODES:
            self._busy_s = self.clock.monotonic_s()
            return "ok"
        if any(replica.silent_s > self.stalled_after_s for replica in view.replicas):
            return "stalled"
        known = [moment for moment in (self._round_s, self._busy_s) if moment is not None]
        if not known:
            return "ok"
        return "stalled" if self.clock.monotonic_s() - max(known) > self.stalled_after_s else "ok"

    def describe_liveness(self) -> dict[str, Any]:
        """Return the verdict with the phase and the age of the last token (None before the first)."""
        age_s = None if self._token_s is None else round(self.clock.monotonic_s() - self._token_s, 3)
        view = self.control.view()
        return {"status": self.verdict(), "phase": view.phase, "last_token_age_s": age_s, "streams": view.streams}


@dataclass(frozen=True, slots=True)
class TargetTerms:
    """What holds for one model's requests. `acceptance`: the rules that they may ask for. `objectives`: what they are
    to have. `places`: of one replica. `price`: of this machine. `loras`: the LoRA adapters that they may name."""

    acceptance: AcceptanceBounds = field(default_factory=AcceptanceBounds)
    objectives: Objectives = NO_OBJECTIVES
    places: int = 1
    price: HourlyPrice = NO_PRICE
    loras: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServedTarget:
    """One model, as the daemon hands it over. `tokenizer` gives None until a worker was ready; `name` may give "" until
    then, where there is one model only. `trial`: of a canary, where there is one. `gate`: None where the model is
    always in memory."""

    control: Control
    tokenizer: Callable[[], Tokenizer | None]
    name: Callable[[], str]
    terms: TargetTerms = field(default_factory=TargetTerms)
    trial: CanaryTrial | None = None
    gate: ModelGate | None = None


class ServedModel:
    """One model, with what the API counts and sees of it. `coming`: requests that are about to be taken in."""

    def __init__(self, target: ServedTarget, metrics: Metrics, liveness: Liveness) -> None:
        self.control = target.control
        self.terms = target.terms
        self.trial = target.trial
        self.gate = target.gate
        self.metrics = metrics
        self.liveness = liveness
        self.coming = 0
        self._target = target

    def take_terms(self, terms: TargetTerms) -> None:
        """Let these terms hold for requests that come from now on; its price stays."""
        self.terms = terms
        self.metrics.slo.set_objectives(terms.objectives)

    @property
    def name(self) -> str:
        """What requests call it; "" while that is not known."""
        return self._target.name()

    def name_with(self, lora: str) -> str:
        return f"{self.name}:{lora}" if lora else self.name

    @property
    def names(self) -> list[str]:
        """All that requests may call it: its name, and that with each of its adapters."""
        return [self.name_with(lora) for lora in ("", *self.terms.loras)]

    def find_lora(self, name: str | None) -> str | None:
        """Return which of its adapters a request names, "" for none; None where it names another model."""
        if name is None:
            return ""
        return next((lora for lora in ("", *self.terms.loras) if self.name_with(lora) == name), None)

    @property
    def phase(self) -> str:
        return self.control.view().phase

    @property
    def serves(self) -> bool:
        """Whether it takes requests now. Those for a model that they load wait until it is."""
        return self.phase in (READY, *_LOADED_FIRST) if self.gate is not None else self.phase == READY

    @property
    def is_coming_up(self) -> bool:
        """Whether it was never ready yet, and may become so."""
        return self.gate is None and self._target.tokenizer() is None and self.phase != FAILED

    @property
    def waits_for_load(self) -> bool:
        """Whether a request has to have it loaded before it can be read."""
        return self.gate is not None and self.find_served() is None

    def hold_model(self) -> AbstractContextManager[None]:
        """A request is taken in: meanwhile its model is not idle."""
        return nullcontext() if self.gate is None else self.gate.hold_model()

    def find_served(self) -> tuple[Tokenizer, Ready] | None:
        """Return the tokenizer and what the worker says that it belongs to, once a worker was ready. Thread-safe."""
        while True:
            ready, tokenizer = self.control.view().ready, self._target.tokenizer()
            if tokenizer is None or ready is None:
                return None
            now = self.control.view().ready
            if now is not None and now.model.digest == ready.model.digest:  # a reload may put another model there
                return tokenizer, ready

    def find_ready(self) -> tuple[Tokenizer, int] | None:
        served = self.find_served()
        return None if served is None else (served[0], served[1].model.context_tokens)

    def require_served(self) -> tuple[Tokenizer, Ready]:
        """Return what `find_served` does. Raises RequestError 503 before a worker was ready."""
        served = self.find_served()
        if served is None:
            raise not_ready(self.control)
        return served

    def require_ready(self) -> tuple[Tokenizer, int]:
        """Return the tokenizer and the context's length. Raises RequestError 503 before a worker was ready."""
        tokenizer, ready = self.require_served()
        return tokenizer, ready.model.context_tokens

    def check_room(self, wanted: int = 1) -> None:
        self.control.check_room(self.coming, wanted)

    def has_place_for_batches(self) -> bool:
        view = self.control.view()
        if self.gate is not None and view.phase in _LOADED_FIRST:
            return view.streams + self.coming < self.terms.places
        if view.phase != READY or (view.gauges is not None and view.gauges.waiting):
            return False
        serving = sum(replica.phase == READY for replica in view.replicas) or 1
        return view.streams < max(1, self.terms.places * serving - 1)

    def describe(self, now_s: float) -> list[dict[str, Any]]:
        view = self.control.view()
        entry: dict[str, Any] = {
            "id": self.name,
            "object": "model",
            "created": int(now_s - view.uptime_s),
            "owned_by": "outrider",
        }
        if view.ready is not None:
            entry["max_model_len"] = view.ready.model.context_tokens
        if view.residency is not None:
            entry["keep"], entry["state"] = view.residency.keep, view.residency.state
        adapted = [{**entry, "id": self.name_with(lora), "parent": self.name} for lora in self.terms.loras]
        return [entry, *adapted]


class ServedModels:
    """All models of the endpoint, in the order of the file. No two have one name."""

    def __init__(self, models: Sequence[ServedModel], clock: Clock) -> None:
        self._models = tuple(models)
        self._clock = clock

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    @property
    def first(self) -> ServedModel:
        """The one of requests that name none."""
        return self._models[0]

    @property
    def several(self) -> bool:
        """Whether a request has to say which it means."""
        return len(self._models) > 1

    @property
    def load_for_requests(self) -> bool:
        """Whether a request may have to wait for its model to be loaded, before it can be read."""
        return any(model.waits_for_load for model in self._models)

    def find(self, name: str) -> ServedModel | None:
        return next((model for model in self._models if name in ("", *model.names)), None)

    def require(self, name: str | None) -> ServedModel:
        """Return the model that a request names; None is the first. Raises RequestError 404."""
        if name is None:
            return self.first
        model = next((model for model in self._models if name in model.names), None)
        if model is None and self.first.name:
            raise self.build_unknown_error(name)
        return model or self.first

    def choose(self, raw: bytes) -> ServedModel:
        """Return the model that a body names, of which nothing else was read yet; the first where it names none, or is
        no such body: whoever parses it says so. Raises RequestError 404."""
        return self.require(_read_name(raw)) if self.several else self.first

    def confirm(self, chosen: ServedModel, name: str | None) -> None:
        """Raise RequestError 404 where a body that was parsed names another model than the one chosen."""
        if self.require(name) is not chosen and name is not None:
            raise self.build_unknown_error(name)

    def build_unknown_error(self, name: str) -> RequestError:
        names = [repr(known) for model in self._models for known in model.names]
        return RequestError(
            f"there is no model '{name}' here; there {'are' if names[1:] else 'is'} {' and '.join(names)}",
            status=404,
            code="model_not_found",
            param="model",
        )

    def check_room(self) -> None:
        """Raise the first model's RequestError where none would take a request in."""
        refused: RequestError | None = None
        for model in self._models:
            try:
                model.check_room()
            except RequestError as error:
                refused = refused or error
            else:
                return
        if refused is not None:
            raise refused

    def find_control(self, name: str) -> Control | None:
        model = self.find(name)
        return model.control if model is not None else None

    def name_line(self, line: BatchLine) -> str:
        """Return the model that a batch's line waits for; "" where that is none of these, and it need not wait."""
        name = line.body.get("model")
        model = self.first if name is None else self.find(name) if isinstance(name, str) and name else None
        return model.name if model is not None else ""

    def has_place_for_batches(self, name: str) -> bool:
        model = self.find(name) if name else None
        return model is None or model.has_place_for_batches()

    def list_entries(self) -> list[dict[str, Any]]:
        now_s = self._clock.wall_s()
        return [entry for model in self._models for entry in model.describe(now_s)]


def not_ready(control: Control, name: str = "", *, whole: bool = True) -> RequestError:
    """Return the 503 that says what the daemon does. `name`: whose, of several models; not `whole`: the phase alone."""
    view = control.view()
    whose = f"the model '{name}'" if name else "the model"
    detail = f": {view.detail}" if view.detail and whole else ""
    held = view.phase == READY and bool(describe_held(view))
    return RequestError(
        f"{whose} {'is kept from work' if held else f'is {view.phase}'}{detail}",
        status=503,
        code="model_cordoned" if held else "model_not_ready",
        retry_after_s=NOT_READY_RETRY_S,
    )


class _Named(msgspec.Struct):
    model: str | None = None


_decode_named = msgspec.json.Decoder(_Named).decode


def _read_name(raw: bytes) -> str | None:
    try:
        return _decode_named(raw).model
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
