"""Follows one request: its log lines, what it adds to the metrics, and its moments in the dashboard's bounded book."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from http import HTTPStatus
from typing import Any, Final, NamedTuple

import msgspec
from starlette.responses import Response

from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.daemon.api.errors import CLIENT_CLOSED, unforeseen
from orchestrator.daemon.api.metrics.collector import Metrics
from orchestrator.daemon.api.metrics.goodput_series import ServedRequest
from orchestrator.daemon.api.metrics.request_timing import RequestTotals, SequenceTiming
from orchestrator.daemon.api.streaming import Piece
from orchestrator.daemon.api.wire import Generation
from orchestrator.daemon.control.rollout.canary import CanaryTrial
from orchestrator.daemon.tracing.port import RequestResult, RequestTrace
from orchestrator.errors import RequestError
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import Delta
from orchestrator.telemetry import get_logger

RESPONSE_PREFIX: Final = "resp_"
"""With an id that begins so, a stored response can be read: without keys nothing else guards it."""
_SHOWN_PREFIX: Final = "response-"
# ADR 0069: the last 200. Bounds memory.
_MOST_REQUESTS: Final = 200
_MOST_MARKS: Final = 64  # of one request, as above
_WHOLE = ("stop", "length")
_log = get_logger(__name__)


def hide_response_id(request_id: str) -> str:
    """Return an id that anybody may see: a digest in place of one that opens a stored response, else the same."""
    if not request_id.startswith(RESPONSE_PREFIX):
        return request_id
    return _SHOWN_PREFIX + hashlib.sha256(request_id.encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class LifeMark:
    """A moment of a request: `at_ms` after it came, its choice `index`, and the replica `engine` that did it.

    `what`: "accepted", "first_token", "moved" or "ended". `queue_ms` and `prefill_ms` come with the first token;
    `pause_ms` is the gap before the first token from another replica."""

    at_ms: float
    what: str
    index: int = 0
    engine: int = 0
    queue_ms: float | None = None
    prefill_ms: float | None = None
    pause_ms: float | None = None


@dataclass(slots=True)
class RequestLife:
    """One request. `came_s`: since 1970; `started_s`: by the daemon's clock. `status` is 0 while it runs; `figures` are
    those of its last log line. `left_out` counts marks beyond the bound."""

    request_id: str
    route: str
    model: str
    stream: bool
    prompt_tokens: int
    max_tokens: int
    choices: int
    came_s: float
    started_s: float
    status: int = 0
    tokens: int = 0
    figures: dict[str, Any] = field(default_factory=dict)
    marks: list[LifeMark] = field(default_factory=list)
    left_out: int = 0

    def note(self, mark: LifeMark) -> None:
        if len(self.marks) < _MOST_MARKS:
            self.marks.append(mark)
        else:
            self.left_out += 1

    def end(self, status: int, figures: dict[str, Any], at_ms: float) -> None:
        """Note the end with its HTTP status. It is kept even where the marks are full."""
        self.status = int(status)
        self.figures = figures
        self.marks.append(LifeMark(at_ms, "ended"))

    @property
    def shown_id(self) -> str:
        """Its id for anybody to see, see hide_response_id."""
        return hide_response_id(self.request_id)

    def describe(self) -> dict[str, Any]:
        fields = asdict(self) | {"request_id": self.shown_id}
        del fields["started_s"]
        return fields


class RequestLives:
    """The last requests that were taken in, of all models. It holds no text of any."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lives: OrderedDict[str, RequestLife] = OrderedDict()

    def open(self, request_id: str, *, started_s: float, **about: Any) -> RequestLife:
        """Begin the record of a request that came at `started_s` (seconds of the clock); the oldest one goes. `about`:
        the fields of RequestLife that are known already."""
        now_s = self._clock.monotonic_s()
        came_s = self._clock.wall_s() - (now_s - started_s)
        life = RequestLife(request_id, came_s=came_s, started_s=started_s, **about)
        life.note(LifeMark((now_s - started_s) * MS_PER_S, "accepted"))
        self._lives[life.shown_id] = life
        while len(self._lives) > _MOST_REQUESTS:
            self._lives.popitem(last=False)
        return life

    def find(self, request_id: str) -> RequestLife | None:
        return self._lives.get(hide_response_id(request_id))

    def list_last(self, count: int) -> list[RequestLife]:
        return list(reversed(self._lives.values()))[:count]


class VariantReport(NamedTuple):
    """The variant that serves a request, and the trial that counts its figures."""

    name: str
    ended: Callable[[RequestTotals], None]


def enter_trial(
    trial: CanaryTrial | None, submits: Sequence[Submit], *, names_rule: bool = False
) -> tuple[Sequence[Submit], VariantReport | None]:
    """Give a request its variant, where a canary is tried. `names_rule`: it names its own acceptance rule."""
    if trial is None:
        return submits, None
    submit, entry = trial.assign_variant(submits[0], names_rule=names_rule)
    rule = submit.sampling.acceptance
    submits = [
        msgspec.structs.replace(choice, variant=submit.variant, sampling=replace(choice.sampling, acceptance=rule))
        for choice in submits
    ]

    def end_trial_entry(done: RequestTotals) -> None:
        ttft_ms, tpot_ms = (None if each is None else each * MS_PER_S for each in (done.ttft_s, done.tpot_s))
        trial.end_entry(entry, ttft_ms=ttft_ms, tpot_ms=tpot_ms, acceptance=done.acceptance, agreement=done.agreement)

    return submits, VariantReport(entry.variant.value, end_trial_entry) if entry.counted else None


class RequestRecord:
    """One request that is known to be well formed; it came at `arrived_s` (seconds of the clock). `model`: whose it is,
    where there are several. `keep_words`: its lines have the text of request and answer, and a bug's the exception's
    message. `variant`: the canary's, where there is one and the request takes part. `spend` is told of the tokens
    of prompt and answer as they come. `lives`: where its moments are kept. `trace`: its spans, where it has some."""

    def __init__(
        self,
        metrics: Metrics,
        clock: Clock,
        arrived_s: float,
        *,
        model: str = "",
        keep_words: bool = False,
        variant: VariantReport | None = None,
        spend: Callable[[int], None] = lambda _: None,
        lives: RequestLives | None = None,
        trace: RequestTrace | None = None,
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._model = {"model": model} if model else {}
        self._keep_words = keep_words
        self._started_s = arrived_s
        self._variant = variant
        self._spend = spend
        self._trace = trace
        self._lives = lives
        self._life: RequestLife | None = None
        self._sequences: list[SequenceTiming] = []  # none of an answer that is told again: it was measured then
        self._ids: list[str] = []
        self._prompt_tokens = 0
        self._head: dict[str, Any] = {}
        self._written: list[str] = []
        self._over = False

    def log_accepted(self, route: str, submits: Sequence[Submit], body: Generation, *, resumed: bool = False) -> None:
        """Write the line of a request that goes to the decode loop. `resumed`: it did before."""
        submit = submits[0]
        if not resumed:
            self._sequences = [
                SequenceTiming(len(choice.prompt), choice.max_tokens, prompt=number // body.n)
                for number, choice in enumerate(submits)
            ]
            self._ids = [choice.request_id for choice in submits]
        variant = {"arm": submit.variant} if submit.variant else {}
        self._head = {"id": submit.request_id, "route": route, **self._model, **variant}
        words = body.model_dump(include={"prompt", "messages"}) if self._keep_words else {}
        prompts = submits[:: body.n]
        self._prompt_tokens = sum(len(each.prompt) for each in prompts)
        self._spend(self._prompt_tokens)
        if self._lives is not None and not resumed:
            self._life = self._lives.open(
                submit.request_id,
                route=route,
                model=self._model.get("model", ""),
                stream=body.stream,
                prompt_tokens=self._prompt_tokens,
                max_tokens=submit.max_tokens,
                choices=len(submits),
                started_s=self._started_s,
            )
        counts = {"n": body.n, "prompt_tokens": self._prompt_tokens, "max_tokens": submit.max_tokens}
        more: dict[str, Any] = {"resumed": True} if resumed else {}
        if len(prompts) > 1:
            more["prompts"] = len(prompts)
        _log.info("request accepted", **self._head, stream=body.stream, **counts, **more, **words)

    def observe_delta(self, index: int, delta: Delta, now_s: float) -> None:
        if not self._sequences:
            return
        sequence = self._sequences[index]
        if delta.tokens:
            self._spend(len(delta.tokens))
            if self._life is not None:
                self._life.tokens += len(delta.tokens)
                if sequence.tokens == 0 or sequence.engine != delta.engine:
                    self._mark(self._life, index, delta, now_s)
            sequence.engine = delta.engine
            if sequence.tokens == 0:
                sequence.first_s = now_s
                self._metrics.observe_first_token(now_s - self._started_s, delta.engine)
            else:
                self._metrics.observe_gap(now_s - sequence.last_s, delta.engine)
            sequence.last_s = now_s
            sequence.tokens += len(delta.tokens)
        sequence.first = sequence.first or delta.stats
        sequence.stats = delta.stats or sequence.stats
        sequence.finish = delta.finish
        if self._trace is not None:
            self._trace.observe_delta(self._ids[index], delta, now_s)

    def _mark(self, life: RequestLife, index: int, delta: Delta, now_s: float) -> None:
        sequence, at_ms = self._sequences[index], (now_s - self._started_s) * MS_PER_S
        if sequence.tokens:
            pause_ms = (now_s - sequence.last_s) * MS_PER_S
            life.note(LifeMark(at_ms, "moved", index, delta.engine, pause_ms=pause_ms))
        else:
            queue_ms, prefill_ms = (delta.stats.queue_ms, delta.stats.prefill_ms) if delta.stats else (None, None)
            life.note(LifeMark(at_ms, "first_token", index, delta.engine, queue_ms, prefill_ms))

    def record_sent(self, *pieces: Piece) -> None:
        if self._keep_words:
            for piece in pieces:
                self._written += [piece.thought, piece.text]
                self._written += [delta["function"]["arguments"] for delta in piece.calls]

    @contextmanager
    def to_the_headers(self) -> Iterator[None]:
        """Write the last line of a request that fails before its answer begins."""
        try:
            yield
        except RequestError as error:
            self.log_end(error.status, reason=error.code)
            raise
        except Exception:
            self.log_end(HTTPStatus.INTERNAL_SERVER_ERROR)
            raise

    def bug(self, error: Exception) -> RequestError:
        """Log a bug met behind the headers; return what the client is told of it."""
        return unforeseen(error, self._head["id"], words=self._keep_words)

    def end_disconnected(self) -> Response:
        self.log_end(CLIENT_CLOSED)
        return Response(status_code=CLIENT_CLOSED)

    def log_end(self, status: int, *, reason: str | None = None) -> None:
        """Write the last line and count the request; only the first call does. `reason` is an error's code."""
        if self._over:
            return
        self._over = True
        for sequence in self._sequences:
            sequence.finish = sequence.finish or _infer_finish_reason(status)
            if sequence.tokens or sequence.finish != "error":  # what was never begun is no request that ended
                self._metrics.observe_end(sequence, self._started_s)
        self._judge(status)
        if self._variant is not None and all(sequence.finish in _WHOLE for sequence in self._sequences):
            self._count_variant(self._variant)
        if self._trace is not None:
            self._trace.end(status, reason, self._sum_up())
        write = _log.warning if status >= HTTPStatus.INTERNAL_SERVER_ERROR else _log.info
        more = {} if reason is None else {"reason": reason}
        if self._keep_words:
            more["output"] = "".join(self._written)
        figures = self._figures()
        if self._life is not None:
            why = {} if reason is None else {"reason": reason}
            ended_ms = (self._clock.monotonic_s() - self._started_s) * MS_PER_S
            self._life.end(status, {**figures, **why}, ended_ms)
        write("request ended", **self._head, status=int(status), **figures, **more)

    def _sum_up(self) -> RequestResult:
        answered = [sequence for sequence in self._sequences if sequence.tokens]
        done = RequestTotals.of(self._sequences, self._started_s)
        cached: dict[int, int] = {}
        for sequence in answered:
            if sequence.first is not None:
                cached[sequence.prompt] = max(cached.get(sequence.prompt, 0), sequence.first.reused)
        return RequestResult(
            input_tokens=self._prompt_tokens if self._sequences else 0,
            cached_tokens=sum(cached.values()),
            output_tokens=sum(sequence.tokens for sequence in self._sequences),
            drafted=done.drafted,
            accepted=done.accepted,
            finish_reasons=tuple(sequence.finish for sequence in self._sequences),
            ttft_s=done.ttft_s,
            tpot_s=done.tpot_s,
        )

    def _judge(self, status: int) -> None:
        """Let the request be judged by its objectives, if the decode loop has, or should have, served it."""
        answered = [sequence for sequence in self._sequences if sequence.tokens]
        refused = status == HTTPStatus.SERVICE_UNAVAILABLE and not answered
        failed = status >= HTTPStatus.INTERNAL_SERVER_ERROR and not refused
        if not (answered or failed or status == CLIENT_CLOSED):
            return  # it was refused, or is the client's mistake
        ttfts = [sequence.first_s - self._started_s for sequence in answered]
        tpots = [sequence.tpot_s for sequence in answered if sequence.tpot_s is not None]
        served = ServedRequest(
            ttft_ms=max(ttfts) * MS_PER_S if ttfts else None,
            tpot_ms=max(tpots) * MS_PER_S if tpots else None,
            latency_ms=(self._clock.monotonic_s() - self._started_s) * MS_PER_S,
            failed=failed,
            left=status == CLIENT_CLOSED,
        )
        self._metrics.observe_request(served, self._sequences[-1].engine if self._sequences else 0)

    def _count_variant(self, variant: VariantReport) -> None:
        """Tell the trial of a request that came to its own end; what was cut off says nothing of its variant."""
        done = RequestTotals.of(self._sequences, self._started_s)
        self._metrics.observe_variant(variant.name, done, self._sequences[0].engine)
        variant.ended(done)

    def _figures(self) -> dict[str, Any]:
        done = self._sum_up()
        last_s = max((sequence.last_s for sequence in self._sequences if sequence.tokens), default=None)
        return {
            "prompt_tokens": done.input_tokens,
            "cached_tokens": done.cached_tokens,
            "generated": done.output_tokens,
            "ttft_ms": _ms(done.ttft_s),
            "tpot_ms": _ms(done.tpot_s),
            "latency_ms": _ms((self._clock.monotonic_s() if last_s is None else last_s) - self._started_s),
            "acceptance": round(done.accepted / done.drafted, 4) if done.drafted else None,
            "finish": ",".join(dict.fromkeys(done.finish_reasons)),
        }


def _infer_finish_reason(status: int) -> str:
    """Why a sequence has no finish of its own: a stop string, a client that went away, or an error."""
    if status == CLIENT_CLOSED:
        return "abort"
    return "stop" if status < HTTPStatus.BAD_REQUEST else "error"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * MS_PER_S, 3)
