"""What goes wrong in a simulation, and when: a schedule in a YAML file, or drawn from mean times between failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, ValidationError

from device_profiles.units import S_PER_HOUR
from orchestrator.config.section import Section
from orchestrator.config.source_text import parse_text, read_text
from orchestrator.config.wording import problems
from orchestrator.errors import ConfigError
from outrider_lab.simulation.fleet import Fleet

FaultKind = Literal["kill_worker", "freeze_worker", "kill_draft", "kill_host", "cut_link", "slow_device", "lose_device"]


class Fault(Section):
    """One thing that goes wrong."""

    at_s: float = Field(ge=0)
    """When, from the beginning."""
    kind: FaultKind
    """A worker's process is killed or stands still, a draft's is killed, a host is away, its network is cut, a device
    slows down, or is lost."""
    name: str = Field(min_length=1, max_length=200)
    """Whose: a replica's name, or a host's."""
    seconds: float = Field(default=0.0, ge=0)
    """How long it lasts; 0: a worker comes back as control decides, everything else stays as it is."""
    factor: float = Field(default=2.0, ge=1, le=1000)
    """`slow_device`: how many times as long its rounds take."""


class RandomFaults(Section):
    """Faults that a seed draws, each after an exponential time."""

    kind: FaultKind
    """As in `faults`."""
    every_hours: float = Field(gt=0)
    """The mean time between two of one replica, or of one host."""
    seconds: float = Field(default=0.0, ge=0)
    """As in `faults`."""
    factor: float = Field(default=2.0, ge=1, le=1000)
    """As in `faults`."""


class FaultSchedule(Section):
    """The whole of it."""

    faults: tuple[Fault, ...] = Field(default=(), max_length=100_000, strict=False)
    """One by one."""
    random: tuple[RandomFaults, ...] = Field(default=(), max_length=64, strict=False)
    """By their mean times."""
    seed: int = 0
    """Of what is drawn."""


ON_HOSTS: tuple[FaultKind, ...] = ("kill_host", "cut_link")


def load_faults(path: Path) -> FaultSchedule:
    """Read a schedule. Raises ConfigError, one line a problem."""
    data, lines = parse_text(read_text(path), path, least="faults")
    try:
        return FaultSchedule.model_validate(data)
    except ValidationError as error:
        raise ConfigError(problems(error, path, lines, FaultSchedule)) from error


def list_faults(schedule: FaultSchedule, fleet: Fleet, seconds: float) -> list[Fault]:
    """Return all faults of so many seconds, in their order. Raises ConfigError for one of what is not there."""
    replicas = [one.name for one in fleet.replicas]
    drafted = [one.name for one in fleet.replicas if one.draft_host]
    hosts = sorted({one.host for one in fleet.replicas} | {one.draft_host for one in fleet.replicas if one.draft_host})
    for number, fault in enumerate(schedule.faults):
        there = _list_concerned(fault.kind, replicas, drafted, hosts)
        if fault.name not in there:
            first = ", ".join(there[:5]) + (", and more" if len(there) > 5 else "")
            found = f"there is {first}" if there else "no replica has a draft worker"
            raise ConfigError(f"faults[{number}].name: there is no {fault.name!r} for {fault.kind}; {found}")
    drawn = [
        one
        for number, rule in enumerate(schedule.random)
        for one in _draw(rule, [schedule.seed, number], _list_concerned(rule.kind, replicas, drafted, hosts), seconds)
    ]
    return sorted([*schedule.faults, *drawn], key=lambda one: one.at_s)


def _list_concerned(
    kind: FaultKind, replicas: Sequence[str], drafted: Sequence[str], hosts: Sequence[str]
) -> Sequence[str]:
    """Return the names of what may go wrong in this way."""
    if kind == "kill_draft":
        return drafted
    return hosts if kind in ON_HOSTS else replicas


def _draw(one: RandomFaults, seed: Sequence[int], names: Sequence[str], seconds: float) -> Iterator[Fault]:
    draw = np.random.default_rng(seed)
    for name in names:
        at_s = float(draw.exponential(one.every_hours * S_PER_HOUR))
        while at_s < seconds:
            yield Fault(at_s=at_s, kind=one.kind, name=name, seconds=one.seconds, factor=one.factor)
            at_s += one.seconds + float(draw.exponential(one.every_hours * S_PER_HOUR))
