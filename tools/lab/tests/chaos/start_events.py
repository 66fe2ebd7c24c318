"""What happens to a daemon while it starts: workers and converters that are killed or stopped, reloads, a full disk,
parts that are kept from work, so that it plans again. The same seed gives the same events at the same times."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import psutil
from outrider_lab.chaos.schedule import PlannedFault, Shape, plan_faults
from outrider_lab.chaos.service import read_workers

from orchestrator.cli.daemon_socket import StatusError, query_daemon
from tests.support.converters import list_converters
from tests.support.daemon import Daemon, starting
from tests.support.small_disk import keep_full
from tests.support.start_checks import ask, look
from tests.support.waiting import until

LASTS_S = 7.0
GAP_S = (0.1, 1.2)
LEAST_SLOTS, MOST_SLOTS = 2, 5
SERVES_WITHIN_S = 120.0
ENDS_WITHIN_S = 60.0
PLANNED_WITHIN_S = 120.0
CONVERTS_WITHIN_S = 10.0
_BEGAN_S = psutil.Process().create_time()
_BROKEN = "limits: [this is, no mapping\n"


@dataclass
class Start:
    """A daemon that starts, and is started again where it ends. `path`: its cluster.yaml, whose last line is `limits`;
    `disk` holds its store and state. `told`: what was done, for whoever reads a failure."""

    path: Path
    disk: Path
    slots: int = LEAST_SLOTS
    told: list[str] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)
    _daemon: Daemon | None = None

    @property
    def daemon(self) -> Daemon:
        """The daemon that runs, or has ended."""
        assert self._daemon is not None
        return self._daemon

    def __enter__(self) -> Start:
        self.write_slots(self.slots)
        self._daemon = self._stack.enter_context(starting(self.path))
        return self

    def __exit__(self, *problem: object) -> None:
        self._stack.close()

    def follow(self, events: Sequence[PlannedFault]) -> None:
        """Let all of it happen, each at its time or when it is its turn, and look after each. Raises AssertionError
        where those who tell of the daemon disagree."""
        steps = sorted((at_s, one.number, one) for one in events for at_s in {one.at_s, one.at_s + one.hold_s})
        began: dict[int, ExitStack] = {}
        before_s = 0.0
        with ExitStack() as holds:
            self.look()
            for at_s, number, event in steps:
                time.sleep(at_s - before_s)  # however long it took to look
                before_s = at_s
                if number in began:
                    began[number].close()
                    self.told.append(f"{at_s:.1f} s: {event.kind} is over")
                else:
                    began[number] = holds.enter_context(ExitStack())
                    what = began[number].enter_context(EVENTS[event.kind](self, event.pick))
                    self.told.append(f"{at_s:.1f} s: {event.kind}: {what or 'nothing to do it to'}")
                self.look()

    def look(self) -> None:
        """See that all agree. Where the daemon has ended it has to say why, and is started again, as by its unit."""
        try:
            standing = look(self.daemon)
            if self.told[-1:] != [seen := f"  {standing.phase}: {standing.why}"]:
                self.told.append(seen)
        except (StatusError, httpx.TransportError, openai.APIConnectionError):
            until(lambda: self.daemon.process.poll() is not None, ENDS_WITHIN_S)
            last = self.daemon.log.read_text(encoding="utf-8").splitlines()[-1]
            self.told.append(f"  the daemon ended with {self.daemon.process.returncode}: {last}")
            assert self.daemon.process.returncode == 1, self.told
            assert last.startswith("outrider: "), self.told
            self._stack.close()
            if _BROKEN in self.path.read_text():  # it would only say so
                return
            self._daemon = self._stack.enter_context(starting(self.path))

    def wait_served(self) -> str:
        """Wait until it serves, see that it takes its file as it is and that all agree; returns what it answers."""
        until(self._serves, SERVES_WITHIN_S)
        report = query_daemon(self.daemon.admin, "/admin/reload", {"check": False}, answer_s=SERVES_WITHIN_S)
        self.look()
        if not report["waiting"]:  # replicas that follow load keep what they began with until a restart
            assert self.daemon.status()["ready"]["slots"] == self.slots
        answer, refused = ask(self.daemon)
        assert not refused
        return answer

    def _serves(self) -> bool:
        self.look()
        return bool(self.daemon.status()["phase"] == "ready")

    def pick_worker(self, pick: float) -> psutil.Process | None:
        """Return a worker's process, whether it loads or serves; None where there is none. Waits for the first."""
        with suppress(StatusError):
            until(lambda: self.daemon.status()["replicas"], PLANNED_WITHIN_S)
            seen = [one for one in read_workers(self.daemon.status()) if one.pid]
            return self._find(seen[int(pick * len(seen))].pid) if seen else None
        return None

    def pick_converter(self, pick: float) -> psutil.Process | None:
        """Return the process of a conversion into its store, which may be about to start; None where none runs."""
        with suppress(AssertionError):
            until(lambda: list_converters(self.disk), CONVERTS_WITHIN_S)
        found = list_converters(self.disk)
        return found[int(pick * len(found))] if found else None

    def write_slots(self, slots: int) -> None:
        """Write the file with that many places for streams."""
        self.slots = slots
        self.path.write_text(f"{self._read_head()}limits: {{kv_cache: 64 MiB, max_running: {slots}}}\n")

    def write_broken(self) -> None:
        """Write a file that is none."""
        self.path.write_text(self._read_head() + _BROKEN)

    def reload(self) -> None:
        """As `systemctl reload`."""
        self.daemon.process.send_signal(signal.SIGHUP)

    def pick_device(self, pick: float) -> str:
        """Return the name of a device that it has a worker on; "" where there is none yet."""
        with suppress(StatusError):
            parts = query_daemon(self.daemon.admin, "/admin/parts")["parts"]
            names = sorted(one["name"] for one in parts if one["kind"] == "device")
            return str(names[int(pick * len(names))]) if names else ""
        return ""

    def hold_device(self, name: str, state: str) -> None:
        """Keep a device from work, or let it work again."""
        with suppress(StatusError):  # it has been planned without since, or the daemon has ended
            query_daemon(self.daemon.admin, "/admin/hold", {"kind": "device", "name": name, "state": state})

    def _read_head(self) -> str:
        return self.path.read_text().partition("limits:")[0]

    def _find(self, pid: int) -> psutil.Process | None:
        """Return a process that is not older than this one: a number may be somebody else's by now."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            return process if process.create_time() >= _BEGAN_S else None
        return None


Event = Callable[[Start, float], AbstractContextManager[str]]
"""What it did, in words; it holds until the end of the block. "" where there was nothing to do it to."""


@contextmanager
def kill_worker(start: Start, pick: float) -> Iterator[str]:
    yield _signal(start.pick_worker(pick), signal.SIGKILL, "a worker")


@contextmanager
def kill_converter(start: Start, pick: float) -> Iterator[str]:
    yield _signal(start.pick_converter(pick), signal.SIGKILL, "a converter")


@contextmanager
def stop_worker(start: Start, pick: float) -> Iterator[str]:
    process = start.pick_worker(pick)
    yield _signal(process, signal.SIGSTOP, "a worker")
    _signal(process, signal.SIGCONT, "a worker")


@contextmanager
def stop_converter(start: Start, pick: float) -> Iterator[str]:
    process = start.pick_converter(pick)
    yield _signal(process, signal.SIGSTOP, "a converter")
    _signal(process, signal.SIGCONT, "a converter")


@contextmanager
def reload_good(start: Start, pick: float) -> Iterator[str]:
    start.write_slots(LEAST_SLOTS + int(pick * (MOST_SLOTS - LEAST_SLOTS + 1)))
    start.reload()
    yield f"reloaded with {start.slots} places"


@contextmanager
def reload_bad(start: Start, pick: float) -> Iterator[str]:
    start.write_broken()
    start.reload()
    yield "reloaded with a broken file"
    start.write_slots(start.slots)
    start.reload()


@contextmanager
def fill_disk(start: Start, pick: float) -> Iterator[str]:
    if (start.disk / "filler").exists():  # it is full
        yield ""
        return
    with keep_full(start.disk):
        yield "filled the disk of store and state"


@contextmanager
def cordon_device(start: Start, pick: float) -> Iterator[str]:
    name = start.pick_device(pick)
    if not name:
        yield ""
        return
    start.hold_device(name, "cordoned")
    yield f"kept {name} from work"
    start.hold_device(name, "")


EVENTS: dict[str, Event] = {
    "kill-worker": kill_worker,
    "stop-worker": stop_worker,
    "kill-converter": kill_converter,
    "stop-converter": stop_converter,
    "reload-good": reload_good,
    "reload-bad": reload_bad,
    "disk-full": fill_disk,
    "cordon-device": cordon_device,
}
SHAPES = {
    "kill-worker": Shape(3),
    "stop-worker": Shape(1, 0.5, 3.0),
    "kill-converter": Shape(2),
    "stop-converter": Shape(1, 0.5, 3.0),
    "reload-good": Shape(1),
    "reload-bad": Shape(1, 0.3, 2.0),
    "disk-full": Shape(1, 1.0, 4.0),
    "cordon-device": Shape(2, 0.3, 3.0),
}


def plan_events(seed: int, kinds: tuple[str, ...]) -> list[PlannedFault]:
    """Return the events of a start, in their order. `hold_s` of one without a hold is 0."""
    shapes = {name: SHAPES[name] for name in kinds}
    return plan_faults(seed, shapes, LASTS_S, GAP_S, first_at_s=0.0, quiet_end_s=0.0)


def _signal(process: psutil.Process | None, number: signal.Signals, what: str) -> str:
    if process is None:
        return ""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
        return f"{number.name} of {what}, pid {process.pid}"
    return ""
