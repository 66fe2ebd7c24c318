"""What a simulation comes to: requests as their clients see them, and what devices did."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_profiles.units import MILLION, MS_PER_S, S_PER_HOUR

PERCENTILES = (50, 90, 95, 99)
FORMULAS = {
    "ttft_ms": "first token at the client - arrival",
    "tpot_ms": "(end - first token) / (n - 1) of each request with n > 1 tokens",
    "e2e_ms": "end - arrival",
    "output_tok_s": "output tokens of completed requests / the time from the first arrival to the last end",
    "goodput_per_s": "completed requests that meet every objective / that time (DistServe)",
    "slo_attainment": "requests that meet every objective / all that arrived, refused ones included",
    "joules_per_token": "time in rounds x the power of the devices under load, by datasheet / output tokens",
    "cost_per_million_tokens": "prices an hour of all placed devices x that time / output tokens x 1,000,000",
    "utilisation": "time in rounds / that time, of the replicas of a kind on the mean",
    "pause_ms": "of a request that lost its worker: its first token behind the loss - the loss",
    "changed_group": "how often a stream went on with other bits",
    "unmarked_changes": "first tokens of a group whose delta does not name it",
    "misplaced_tokens": "deltas that do not go on where their stream was: tokens lost or doubled",
}


@dataclass(slots=True)
class TargetUse:
    """What all replicas of a kind did."""

    replicas: int = 0
    busy_s: float = 0.0
    rounds: int = 0
    sequences: float = 0.0
    tokens: float = 0.0
    drafted: float = 0.0

    def observe_step(self, rounds: int, took_s: float, sequences: int, tokens: float, drafted: float) -> None:
        """Count rounds that are alike, which took so long in all."""
        self.busy_s += took_s
        self.rounds += rounds
        self.sequences += rounds * sequences
        self.tokens += tokens
        self.drafted += drafted


@dataclass(slots=True)
class Outcomes:
    """Requests that ended, one entry each; times in seconds on the virtual clock. `errors` counts the others by what
    they were told. `pauses_ms`: of requests that lost their workers. The last three: see FORMULAS."""

    arrivals_s: array[float] = field(default_factory=lambda: array("d"))
    firsts_s: array[float] = field(default_factory=lambda: array("d"))
    ends_s: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[int] = field(default_factory=lambda: array("l"))
    prompts: array[int] = field(default_factory=lambda: array("l"))
    classes: array[int] = field(default_factory=lambda: array("l"))
    names: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    asked: int = 0
    asked_of: list[int] = field(default_factory=list)
    pauses_ms: list[float] = field(default_factory=list)
    changed_group: int = 0
    unmarked_changes: int = 0
    misplaced_tokens: int = 0

    def ask(self, name: str) -> int:
        """Count a request of a class of users; return the number of the class."""
        if name not in self.names:
            self.names.append(name)
            self.asked_of.append(0)
        number = self.names.index(name)
        self.asked += 1
        self.asked_of[number] += 1
        return number

    def count_ended(self) -> int:
        return len(self.ends_s) + self.errors.total()

    def add(self, arrival_s: float, first_s: float, end_s: float, tokens: int, prompt: int, user_class: int) -> None:
        self.arrivals_s.append(arrival_s)
        self.firsts_s.append(first_s)
        self.ends_s.append(end_s)
        self.tokens.append(tokens)
        self.prompts.append(prompt)
        self.classes.append(user_class)

    def summarise(self, slo: dict[str, float], price_per_hour: float = 0.0) -> dict[str, Any]:
        """Return the figures by name, and those of each class where there are several. `slo`: bounds in ms, by
        figure."""
        arrivals, firsts, ends = (np.frombuffer(one) for one in (self.arrivals_s, self.firsts_s, self.ends_s))
        tokens = np.array(self.tokens, dtype=np.int64)
        whole = _summarise(arrivals, firsts, ends, tokens, slo, self.asked)
        span_s, made = whole["duration_s"], int(tokens.sum())
        cost = price_per_hour * span_s / S_PER_HOUR * MILLION / max(1, made)
        found: dict[str, Any] = {
            "requests": self.asked,
            "completed": len(arrivals),
            "failed": sum(self.errors.values()),
            "unfinished": self.asked - len(arrivals) - sum(self.errors.values()),
            "errors": dict(sorted(self.errors.items())),
            **whole,
            "cost_per_million_tokens": cost if price_per_hour and made else None,
            "pause_ms": summarise_values(self.pauses_ms),
            "changed_group": self.changed_group,
            "unmarked_changes": self.unmarked_changes,
            "misplaced_tokens": self.misplaced_tokens,
        }
        if len(self.names) > 1:
            classes = np.array(self.classes)
            found["classes"] = {}
            for number, name in enumerate(self.names):
                mine = classes == number
                told = _summarise(arrivals[mine], firsts[mine], ends[mine], tokens[mine], slo, self.asked_of[number])
                found["classes"][name] = {"requests": self.asked_of[number], "completed": int(mine.sum()), **told}
        return found


def _summarise(
    arrivals_s: NDArray[np.float64],
    firsts_s: NDArray[np.float64],
    ends_s: NDArray[np.float64],
    tokens: NDArray[np.int64],
    slo: dict[str, float],
    asked: int,
) -> dict[str, Any]:
    span_s = float(ends_s.max() - arrivals_s.min()) if len(ends_s) else 0.0
    several = tokens > 1
    values = {
        "ttft_ms": (firsts_s - arrivals_s) * MS_PER_S,
        "tpot_ms": np.where(several, (ends_s - firsts_s) / np.maximum(1, tokens - 1), 0.0) * MS_PER_S,
        "e2e_ms": (ends_s - arrivals_s) * MS_PER_S,
    }
    met = np.ones(len(tokens), dtype=bool)
    for name, bound in slo.items():
        met &= values[name] <= bound
    return {
        "duration_s": span_s,
        "requests_per_s": len(tokens) / span_s if span_s else 0.0,
        "output_tokens": int(tokens.sum()),
        "output_tok_s": float(tokens.sum()) / span_s if span_s else 0.0,
        "goodput_per_s": float(met.sum()) / span_s if span_s and slo else None,
        "slo_attainment": float(met.sum()) / asked if slo and asked else None,
        "ttft_ms": summarise_values(values["ttft_ms"]),
        "tpot_ms": summarise_values(values["tpot_ms"][several]),
        "e2e_ms": summarise_values(values["e2e_ms"]),
    }


def summarise_values(values: Sequence[float] | NDArray[np.float64]) -> dict[str, float] | None:
    """Return the mean and percentiles (linear between ranks); None of nothing."""
    if not len(values):
        return None
    found = np.percentile(values, PERCENTILES)
    return {
        "mean": float(np.mean(values)),
        **{f"p{rank}": float(one) for rank, one in zip(PERCENTILES, found, strict=True)},
    }
