"""Who takes the processor's time: this program's processes, or any other, core by core.

The kernel counts the time of each core, and of each process. What our processes took is shared out over the cores that
they may use, those that are pinned to the fewest cores first. The rest of a core's time is somebody else's; time that a
hypervisor gave to another machine is, too. How many threads want a core is counted once a measurement, for all cores
together, and shared out over those that others use.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import psutil

from adapters.control_groups import PROC, list_groups
from device_profiles.device_load import CoreLoad
from device_profiles.units import US_PER_S

_LOAD: Final = Path("/proc/loadavg")
_GONE: Final = (psutil.Error, OSError)


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Who takes the processor. `utilisation` and `others` are shares of the time that this process may use: of the
    cores that it may run on, or of what its control group may have of them. `rivals`: as CoreLoad has them."""

    utilisation: float
    others: float
    cores: Mapping[int, CoreLoad]
    rivals: float | None = None


@dataclass(frozen=True, slots=True)
class GroupTime:
    """What a control group may use, in cores, and what it has used so far."""

    cores: float
    used_s: float


@dataclass(frozen=True, slots=True)
class _Counters:
    at_s: float
    cores: Mapping[int, tuple[float, float]]  # busy, all
    processes: Mapping[tuple[int, float], tuple[float, tuple[int, ...]]]  # seconds, and the cores that it may use
    group: GroupTime | None
    allowed: tuple[int, ...] = field(default=())
    runnable: int | None = None


class ProcessorMeter:
    """Measures from one call to the next. To be called by one thread at a time."""

    def __init__(self) -> None:
        self._last: _Counters | None = None

    def measure(self, own: Iterable[psutil.Process]) -> ProcessorTime | None:
        """Return who took the processor's time since the last call; None at the first."""
        now = _read_counters(own)
        last, self._last = self._last, now
        if last is None or now.at_s <= last.at_s:
            return None
        busy, whole = {}, {}
        for core, (used_s, all_s) in now.cores.items():
            before = last.cores.get(core)
            if before is not None and all_s > before[1]:
                busy[core], whole[core] = max(0.0, used_s - before[0]), all_s - before[1]
        spent = [
            (seconds - last.processes[key][0] if key in last.processes else min(seconds, now.at_s - last.at_s), cores)
            for key, (seconds, cores) in now.processes.items()
        ]
        ours = share_out(busy, spent)
        cores = {
            core: CoreLoad(_share(ours[core], whole[core]), _share(busy[core] - ours[core], whole[core]))
            for core in busy
        }
        cores = share_out_rivals(cores, now.runnable)
        return sum_up(cores, now.allowed, *_measure_group(last, now, sum(seconds for seconds, _ in spent)))


def share_out(busy: Mapping[int, float], spent: Iterable[tuple[float, Sequence[int]]]) -> dict[int, float]:
    """Return how much of each core's busy time processes took that spent so much on any of these cores. A core is given
    no more than it was busy."""
    ours = dict.fromkeys(busy, 0.0)
    for seconds, cores in sorted(spent, key=lambda share: len(share[1])):
        left = {core: busy[core] - ours[core] for core in cores if core in busy}
        room = sum(left.values())
        if seconds > 0.0 and room > 0.0:
            for core, free in left.items():
                ours[core] += free * min(1.0, seconds / room)
    return ours


def share_out_rivals(cores: Mapping[int, CoreLoad], runnable: int | None) -> dict[int, CoreLoad]:
    """Return these cores with how many threads of other programs want each. `runnable`: the threads that run on them
    or want to, of all programs, with the one that asks; None where that is not known."""
    if runnable is None:
        return dict(cores)
    others = sum(load.others for load in cores.values())
    theirs = max(others, runnable - 1 - sum(load.ours for load in cores.values()))
    return {core: replace(load, rivals=theirs * _share(load.others, others)) for core, load in cores.items()}


def sum_up(
    cores: Mapping[int, CoreLoad], allowed: Sequence[int], group_cores: float = 0.0, group_others: float = 0.0
) -> ProcessorTime:
    """Return the whole of what we may use. `group_cores`: how many a control group may have (0: all), of which
    `group_others` is the share that other programs in it take."""
    known = [cores[core] for core in allowed if core in cores]
    count = len(known)
    if not count:
        return ProcessorTime(0.0, 0.0, cores)
    ours, others = sum(load.ours for load in known), sum(load.others for load in known)
    counted = [load.rivals for load in known if load.rivals is not None]
    rivals = sum(counted) / count if len(counted) == count else None
    if not 0.0 < group_cores < count:
        return ProcessorTime(min(1.0, (ours + others) / count), others / count, cores, rivals)
    beyond = 1.0 - min(1.0, (count - others) / group_cores)
    taken = max(group_others, beyond)
    return ProcessorTime(min(1.0, ours / group_cores + taken), taken, cores)


def list_own_processes(also: Iterable[int] = (), but: Iterable[int] = ()) -> list[psutil.Process]:
    """Return this process, all that it has started, and workers that somebody else has: these by their numbers. `but`
    for these workers, and what they have started."""
    processes: dict[int, psutil.Process] = {}
    for number in (os.getpid(), *also):
        if number not in processes:
            processes |= _list_family(number)
    for number in but:
        for stranger in _list_family(number):
            processes.pop(stranger, None)
    return list(processes.values())


def _list_family(number: int) -> dict[int, psutil.Process]:
    """Return this process, or a worker, and all that it has started; nothing of another program."""
    with suppress(*_GONE):
        process = psutil.Process(number)
        if number == os.getpid() or _is_worker(process):
            return {number: process, **{child.pid: child for child in process.children(recursive=True)}}
    return {}


def sum_held_bytes(own: Iterable[psutil.Process]) -> int:
    """Return the memory that these processes hold for themselves, this one left out: what its end would give back."""
    held = 0
    for process in own:
        if process.pid != os.getpid():
            with suppress(*_GONE):
                memory = process.memory_info()
                held += max(0, memory.rss - getattr(memory, "shared", 0))
    return held


def _is_worker(process: psutil.Process) -> bool:
    """Tell a worker from a process that has its number by chance: workers on other hosts have numbers, too."""
    line = " ".join(process.cmdline())
    return "orchestrator" in line or line.startswith("ray::")


def _read_counters(own: Iterable[psutil.Process]) -> _Counters:
    processes: dict[tuple[int, float], tuple[float, tuple[int, ...]]] = {}
    for process in own:
        with suppress(*_GONE):
            times = process.cpu_times()
            allowed = _list_thread_cores(process.pid)
            processes[process.pid, process.create_time()] = times.user + times.system, allowed
    cores = {}
    for core, spent in enumerate(psutil.cpu_times(percpu=True)):
        idle = spent.idle + getattr(spent, "iowait", 0.0)
        whole = sum(spent) - getattr(spent, "guest", 0.0) - getattr(spent, "guest_nice", 0.0)
        cores[core] = (whole - idle, whole)
    usable = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else tuple(cores)
    every = {key: (seconds, allowed or tuple(cores)) for key, (seconds, allowed) in processes.items()}
    return _Counters(time.monotonic(), cores, every, read_group_time(), usable, count_runnable())


def _list_thread_cores(number: int) -> tuple[int, ...]:
    """Return the cores that a process's threads may use together, none where the system does not say. The first thread
    alone does not tell: a runtime binds it to one core while it computes, and others to the rest."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    cores: set[int] = set()
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{number}/task"):
            with suppress(OSError):
                cores |= os.sched_getaffinity(int(thread))
    return tuple(sorted(cores))


def count_runnable(path: Path = _LOAD) -> int | None:
    """Return how many threads run on this host's cores or want to, this one too; None where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(path.read_text().split()[3].partition("/")[0])
    return None


def read_group_time(proc: Path = PROC) -> GroupTime | None:
    """Return what the tightest control group (version 2) around this process may use; None where none is bounded."""
    bounds = [_read_bound(group.directory) for group in list_groups("cpu", proc) if group.version == 2]
    return min((bound for bound in bounds if bound is not None), key=lambda bound: bound.cores, default=None)


def _read_bound(group: Path) -> GroupTime | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        used = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if quota == "max":
        return None
    return GroupTime(int(quota) / int(period), int(used.get("usage_usec", 0)) / US_PER_S)


def _measure_group(last: _Counters, now: _Counters, ours_s: float) -> tuple[float, float]:
    if last.group is None or now.group is None:
        return 0.0, 0.0
    whole_s = now.group.cores * (now.at_s - last.at_s)
    return now.group.cores, _share(now.group.used_s - last.group.used_s - ours_s, whole_s)


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0.0 else 0.0


def read_processor_temperatures() -> tuple[float | None, float | None]:
    """Return the hottest of the processor's sensors, and where it slows down, in degrees Celsius. Many virtual machines
    have none, and other systems no such call."""
    sensors: dict[str, Any] = getattr(psutil, "sensors_temperatures", dict)()
    readings = [reading for chip in ("k10temp", "coretemp", "cpu_thermal") for reading in sensors.get(chip, ())]
    limits = [limit for reading in readings if (limit := reading.high or reading.critical)]
    return max((float(reading.current) for reading in readings), default=None), min(map(float, limits), default=None)
