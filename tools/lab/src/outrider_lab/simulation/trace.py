"""Traffic: when requests come, how long prompts and outputs are, whose they are, and which prompts begin alike.

A trace is a file of requests, or made by a seed. Of files there are our own (JSON lines, as `outrider bench serve
--record-trace` writes them) and three public forms: Azure's LLM inference traces (CSV with TIMESTAMP, ContextTokens,
GeneratedTokens), BurstGPT (CSV with Timestamp, Request tokens, Response tokens), and Mooncake's (JSON lines with
timestamp, input_length, output_length, hash_ids of blocks of 512 tokens).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from orchestrator.config.section import Section
from orchestrator.config.source_text import parse_text, read_text
from orchestrator.config.wording import problems
from orchestrator.errors import OutriderError

_CHUNK = 8192
_MOONCAKE_BLOCK = 512
S_PER_DAY = 86_400.0


class TraceError(OutriderError):
    """A trace cannot be read or made; the message says where, and the way out."""


class TracedRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request. It arrives at `arrival_s` from the beginning. `user_class`: of its user, `category`: of its text, by
    which its acceptance is chosen. The first `prefix_tokens` of its prompt are those of all with the same `prefix`."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    user_class: str = ""
    category: str = ""
    prefix: str = ""
    prefix_tokens: int = 0


class UserClass(Section):
    """Requests of one kind of user. Lengths are drawn from log-normal distributions with this median and spread."""

    name: str = Field(default="", max_length=64)
    """What figures call it."""
    share: float = Field(default=1.0, gt=0)
    """Its share of all requests, beside those of the others."""
    prompt_tokens: int = Field(default=256, ge=1, le=1_000_000)
    """The median of prompts."""
    output_tokens: int = Field(default=128, ge=1, le=1_000_000)
    """The median of outputs."""
    spread: float = Field(default=0.6, ge=0, le=4)
    """The standard deviation of the logarithm of both lengths; 0: all are alike."""
    prefixes: int = Field(default=0, ge=0, le=1_000_000)
    """How many beginnings of prompts there are to choose from; 0: no two prompts begin alike."""
    prefix_tokens: int = Field(default=0, ge=0, le=1_000_000)
    """The tokens of such a beginning."""
    category: str = Field(default="", max_length=64)
    """Of its texts, as the recording of acceptance names them. Empty: all in turn."""


class MadeTraffic(Section):
    """Traffic that a seed makes."""

    arrival: Literal["poisson", "bursts", "diurnal", "constant"] = "poisson"
    """How requests arrive: independently, in bursts, with the time of day, or in equal gaps."""
    rate: float = Field(default=1.0, gt=0, le=10_000_000)
    """Requests a second, on the mean over all."""
    seconds: float = Field(default=600.0, gt=0, le=31 * S_PER_DAY)
    """How long it lasts."""
    burst_factor: float = Field(default=4.0, ge=1, le=1000)
    """`bursts`: how many times the mean rate a burst has."""
    burst_s: float = Field(default=30.0, gt=0)
    """`bursts`: how long one lasts, on the mean."""
    trough: float = Field(default=0.3, gt=0, le=1)
    """`diurnal`: the least rate of a day over its mean."""
    period_s: float = Field(default=S_PER_DAY, gt=0)
    """`diurnal`: the length of a day."""
    classes: tuple[UserClass, ...] = Field(default=(UserClass(),), min_length=1, max_length=64, strict=False)
    """The users."""
    seed: int = 0
    """Of all that is drawn."""


class TraceFile(Section):
    """A trace that is made, as a YAML file says."""

    traffic: MadeTraffic
    """What is made."""


Requests = Iterator[TracedRequest]
_Reader = Callable[[Path], Requests]


def open_trace(source: str) -> Requests:
    """Return the requests of a trace: a file, or `poisson:rate=5,seconds=600` and the like. Raises TraceError or
    ConfigError."""
    name, _, rest = source.partition(":")
    if name in ("poisson", "bursts", "diurnal", "constant"):
        return make_requests(_parse_made(source, name, rest))
    path = Path(source)
    if path.suffix in (".yaml", ".yml"):
        return make_requests(load_traffic(path))
    readers: dict[str, _Reader] = {".jsonl": _read_json_lines, ".json": _read_json_lines, ".csv": _read_csv}
    if path.suffix not in readers:
        raise TraceError(
            f"--trace {source}: a trace is a .jsonl, .csv or .yaml file, or poisson:, bursts:, diurnal: or constant: "
            "with key=value, as in poisson:rate=5,seconds=600"
        )
    if not path.is_file():
        raise TraceError(f"--trace {source}: there is no such file")
    return readers[path.suffix](path)


def load_traffic(path: Path) -> MadeTraffic:
    """Read what a YAML file says of traffic. Raises ConfigError, one line a problem."""
    from orchestrator.errors import ConfigError

    data, lines = parse_text(read_text(path), path, least="traffic")
    try:
        return TraceFile.model_validate(data).traffic
    except ValidationError as error:
        raise ConfigError(problems(error, path, lines, TraceFile)) from error


def _parse_made(source: str, arrival: str, rest: str) -> MadeTraffic:
    fields: dict[str, Any] = {"arrival": arrival}
    users: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        where = users if key in UserClass.model_fields else fields
        if not equals or (key not in MadeTraffic.model_fields and key not in UserClass.model_fields):
            there = ", ".join(one for one in (*MadeTraffic.model_fields, *UserClass.model_fields) if one != "classes")
            raise TraceError(f"--trace {source}: {pair!r} is none of: {there}, each with =VALUE")
        try:
            where[key] = msgspec.json.decode(value) if key not in ("name", "category") else value
        except msgspec.DecodeError as error:
            raise TraceError(f"--trace {source}: {key}={value}: {value!r} is no number") from error
    if users:
        fields["classes"] = (users,)
    try:
        return MadeTraffic.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(one) for one in first["loc"])
        raise TraceError(f"--trace {source}: {place}: {first['msg']}") from error


def make_requests(traffic: MadeTraffic) -> Requests:
    """Yield the requests that a seed makes, in the order of their arrival."""
    draw = np.random.default_rng(traffic.seed)
    shares = np.array([one.share for one in traffic.classes])
    shares = shares / shares.sum()
    for times_s in _draw_arrivals(traffic, draw):
        chosen = draw.choice(len(shares), size=len(times_s), p=shares)
        spread = draw.standard_normal((len(times_s), 2))
        prefix = draw.random(len(times_s))
        for number, time_s in enumerate(times_s.tolist()):
            user = traffic.classes[int(chosen[number])]
            prompt = max(1, round(user.prompt_tokens * math.exp(user.spread * float(spread[number, 0]))))
            output = max(1, round(user.output_tokens * math.exp(user.spread * float(spread[number, 1]))))
            shared = f"{user.name}/{int(prefix[number] * user.prefixes)}" if user.prefixes else ""
            yield TracedRequest(
                time_s,
                prompt + (user.prefix_tokens if shared else 0),
                output,
                user.name,
                user.category,
                shared,
                user.prefix_tokens if shared else 0,
            )


def _draw_arrivals(traffic: MadeTraffic, draw: np.random.Generator) -> Iterator[NDArray[np.float64]]:
    """Yield arrival times, some thousands at a time. Rates that change are drawn by thinning (Lewis and Shedler,
    1979)."""
    if traffic.arrival == "constant":
        count = int(traffic.rate * traffic.seconds)
        for start in range(0, count, _CHUNK):
            yield np.arange(start, min(start + _CHUNK, count)) / traffic.rate
        return
    rate_at, highest = _find_rate(traffic, draw)
    now_s = 0.0
    while now_s < traffic.seconds:
        times_s = now_s + np.cumsum(draw.exponential(1.0 / highest, _CHUNK))
        now_s = float(times_s[-1])
        kept = times_s[draw.random(_CHUNK) * highest < rate_at(times_s)]
        yield kept[kept < traffic.seconds]


_RateAt = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def _find_rate(traffic: MadeTraffic, draw: np.random.Generator) -> tuple[_RateAt, float]:
    mean = traffic.rate
    if traffic.arrival == "diurnal":
        swing = 1.0 - traffic.trough

        def by_day(times_s: NDArray[np.float64]) -> NDArray[np.float64]:
            return mean * (1.0 - swing * np.cos(2.0 * np.pi * times_s / traffic.period_s))

        return by_day, mean * (1.0 + swing)
    if traffic.arrival == "bursts":
        high, low = mean * traffic.burst_factor, mean / 2.0
        quiet_s = traffic.burst_s * (high - mean) / (mean - low)
        ends = np.cumsum(_draw_stays(draw, (quiet_s, traffic.burst_s), traffic.seconds))

        def by_state(times_s: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.where(np.searchsorted(ends, times_s) % 2 == 1, high, low)

        return by_state, high
    return (lambda times_s: np.full(len(times_s), mean)), mean


def _draw_stays(draw: np.random.Generator, means_s: tuple[float, float], seconds: float) -> list[float]:
    """Return how long each quiet time and each burst lasts, in turn, for so many seconds at least."""
    stays: list[float] = []
    drawn_s = 0.0
    while drawn_s < seconds:
        both = [float(draw.exponential(mean_s)) for mean_s in means_s]
        stays += both
        drawn_s += sum(both)
    return stays


def _read_json_lines(path: Path) -> Requests:
    first_s: float | None = None
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                data = msgspec.json.decode(line, type=dict[str, Any])
                made = _from_mooncake(data) if "input_length" in data else msgspec.convert(data, TracedRequest)
            except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
                raise TraceError(f"{path}:{number}: no request of a trace: {error}") from error
            first_s = made.arrival_s if first_s is None else first_s
            yield _check(msgspec.structs.replace(made, arrival_s=made.arrival_s - first_s), path, number)


def _from_mooncake(data: Mapping[str, Any]) -> TracedRequest:
    hashes = data.get("hash_ids") or []
    shared = min(int(data["input_length"]), _MOONCAKE_BLOCK) if hashes else 0
    prefix = str(hashes[0]) if hashes else ""
    tokens = (int(data["input_length"]), max(1, int(data["output_length"])))
    return TracedRequest(float(data["timestamp"]) / 1000.0, *tokens, prefix=prefix, prefix_tokens=shared)


_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURST_GPT = ("Timestamp", "Request tokens", "Response tokens")


def _read_csv(path: Path) -> Requests:
    first_s: float | None = None
    with path.open(newline="", encoding="utf-8-sig") as text:
        rows = csv.DictReader(text)
        names = rows.fieldnames or []
        form = next((form for form in (_AZURE, _BURST_GPT) if all(name in names for name in form)), None)
        if form is None:
            raise TraceError(
                f"{path}:1: a CSV trace has the columns {', '.join(_AZURE)} or {', '.join(_BURST_GPT)}, and this has "
                f"{', '.join(names) or 'none'}"
            )
        for number, row in enumerate(rows, 2):
            try:
                at_s, prompt, output = _read_time_s(row[form[0]]), int(row[form[1]]), int(row[form[2]])
            except (TypeError, ValueError) as error:
                raise TraceError(f"{path}:{number}: no request of a trace: {error}") from error
            if output < 1:  # it failed when it was recorded
                continue
            first_s = at_s if first_s is None else first_s
            yield _check(TracedRequest(at_s - first_s, prompt, output), path, number)


def _read_time_s(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text[:26].strip()).timestamp()


def _check(one: TracedRequest, path: Path, number: int) -> TracedRequest:
    if one.prompt_tokens < 1 or one.output_tokens < 1 or one.arrival_s < 0.0:
        raise TraceError(f"{path}:{number}: tokens are 1 or more, and times ascend: {msgspec.to_builtins(one)}")
    return one


def save_requests(requests: Sequence[TracedRequest], path: Path) -> None:
    """Write a trace of our own form. Raises TraceError."""
    try:
        with path.open("wb") as out:
            out.writelines(msgspec.json.encode(one) + b"\n" for one in requests)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror}") from error
