"""What an alert compares. Each expression is told in PromQL, and `evaluator` computes the same from samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """A metric, summed (or its largest, by `fold`) over all but the labels of the alert. `over_s`: how much a counter
    grew a second in that time; 0 is a gauge as it is now. `only`: labels that it must have."""

    metric: str
    over_s: float = 0.0
    only: tuple[tuple[str, str], ...] = ()
    fold: Literal["sum", "max"] = "sum"

    def tell(self, by: Labels, time_factor: float) -> str:
        """Return it in PromQL; times are multiplied by the factor."""
        only = ", ".join(f'{name}="{value}"' for name, value in self.only)
        text = self.metric + (f"{{{only}}}" if only else "")
        if self.over_s:
            text = f"rate({text}[{tell_time(self.over_s * time_factor)}])"
        return f"{self.fold} by ({', '.join(by)}) ({text})"

    @property
    def reads(self) -> tuple[Read, ...]:
        """What is read for it."""
        return (self,)


@dataclass(frozen=True, slots=True)
class Ratio:
    """One metric by another. Nothing by nothing is neither above nor below anything."""

    over: Read
    under: Read

    def tell(self, by: Labels, time_factor: float) -> str:
        """Return it in PromQL."""
        return f"{self.over.tell(by, time_factor)} / {self.under.tell(by, time_factor)}"

    @property
    def reads(self) -> tuple[Read, ...]:
        """What is read for it."""
        return (self.over, self.under)


@dataclass(frozen=True, slots=True)
class Condition:
    """A figure is above or below `bound`, or below or above `bound` x `times`."""

    figure: Read | Ratio
    is_: Literal["<", ">"]
    bound: float
    times: Read | None = None

    def tell(self, by: Labels, time_factor: float) -> str:
        """Return it in PromQL."""
        bound = f"{self.bound:g}"
        if self.times is not None:
            bound = f"{bound} * {self.times.tell(by, time_factor)}"
        return f"{self.figure.tell(by, time_factor)} {self.is_} {bound}"

    @property
    def reads(self) -> tuple[Read, ...]:
        """What is read for it."""
        return self.figure.reads + (() if self.times is None else (self.times,))


@dataclass(frozen=True, slots=True)
class Absent:
    """There is no series of a metric."""

    metric: str

    def tell(self, by: Labels, time_factor: float) -> str:
        """Return it in PromQL."""
        return f"absent({self.metric})"

    @property
    def reads(self) -> tuple[Read, ...]:
        """What is read for it."""
        return (Read(self.metric),)


def tell_time(seconds: float) -> str:
    """Return a time as Prometheus writes it."""
    whole_ms = round(seconds * 1000.0)
    for unit, ms in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if whole_ms % ms == 0 and whole_ms:
            return f"{whole_ms // ms}{unit}"
    return f"{whole_ms}ms" if whole_ms else "0s"
