"""One run: start a daemon, take undisturbed answers, put load on it, break things, compare, report."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import platform
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from adapters.hardware import processor
from outrider_lab.bench.cluster.hosts import BenchHosts
from outrider_lab.chaos import records
from outrider_lab.chaos.answers import ClientAnswer
from outrider_lab.chaos.cases import Case, Lengths, make_cases
from outrider_lab.chaos.clients import ChaosClient, StreamBroken, Told
from outrider_lab.chaos.compare import Difference, compare_tokens
from outrider_lab.chaos.faults import KINDS
from outrider_lab.chaos.faults.base import Arena, Fault, NoTarget
from outrider_lab.chaos.faults.clocks import ClockJump, build_shim
from outrider_lab.chaos.faults.links import find_host_obstacle
from outrider_lab.chaos.faults.processes import KillDaemon
from outrider_lab.chaos.faults.storage import SMALL_MIB, DiskFull, small_file_system
from outrider_lab.chaos.faults.traffic import Poison
from outrider_lab.chaos.hosts import two_hosts
from outrider_lab.chaos.records import FaultRecord, StreamRecord
from outrider_lab.chaos.report import read_warnings, stream_row
from outrider_lab.chaos.schedule import PlannedFault, plan_faults, plan_turns
from outrider_lab.chaos.service import PACKAGES, ChaosError, Layout, Service, list_groups, write_configuration
from outrider_lab.chaos.watch import Watch
from outrider_lab.free_port import find_free_port

CASES = {"scripted": 24, "default": 16, "pool": 8}
LENGTHS = {"scripted": Lengths(120, 480, 2800), "default": Lengths(24, 64, 14_000), "pool": Lengths(24, 64, 2800)}
AT_ONCE = 8
READY_LIMIT_S = 90.0
SETTLE_S = 2.0
THINK_S = 1.0
STREAMED_SHARE = 0.75
_SHOWN_CHARS = 40
_REDRAW_S = 0.25


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked for. `faults`: so many, one after the other, each of the next worker; 0: as many as the time has
    room for. `hosts`: with Ray on them, where they are there."""

    seed: int
    duration_s: float
    layout: Layout
    kinds: Sequence[type[Fault]]
    skipped: dict[str, str]
    prompts: Path | None = None
    json_out: Path | None = None
    faults: int = 0
    hosts: BenchHosts | None = None


def make_run(options: Options, console: Console) -> dict[str, Any]:
    """Make the run and write its files; returns the report. Raises ChaosError."""
    with ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="outrider-chaos-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        environment, hosts = _prepare(options, directory, stack)
        run = _Run(options, directory, environment, hosts, console)
        report = asyncio.run(run.make()) if hosts is None else hosts.run_on(0, lambda: asyncio.run(run.make()))
        if options.json_out is not None:
            shutil.copyfile(run.service.log, options.json_out.with_suffix(".log"))
    return report


def _prepare(options: Options, directory: Path, stack: ExitStack) -> tuple[dict[str, str], BenchHosts | None]:
    """Make what faults need before the daemon starts: a small file system, a wall clock of its own, two hosts."""
    state = directory / "state"
    state.mkdir()
    if DiskFull in options.kinds:
        stack.enter_context(small_file_system(state, SMALL_MIB[options.layout.model]))
    paths = os.environ.get("PYTHONPATH", "")
    environment = {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([*PACKAGES, *filter(None, paths.split(os.pathsep))])),
        "XDG_CACHE_HOME": str(state / "cache"),
        "XDG_STATE_HOME": str(state / "state"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    if ClockJump in options.kinds:
        environment |= build_shim(directory)
    hosts = options.hosts
    if hosts is None and options.layout.runtime == "ray" and not find_host_obstacle():
        hosts = stack.enter_context(two_hosts(environment))
    if hosts is not None:
        environment |= hosts.token
    return environment, hosts


class _Run:
    """The state of a run; `make` may be called once, on an event loop of its own."""

    def __init__(
        self,
        options: Options,
        directory: Path,
        environment: dict[str, str],
        hosts: BenchHosts | None,
        console: Console,
    ) -> None:
        layout = options.layout
        if hosts is not None:
            layout = Layout(
                **{**asdict(layout), "hosts": tuple(host.address for host in hosts.hosts), "address": hosts.address},
            )
        port = find_free_port()
        self._options, self._console = options, console
        self.service = Service(
            directory,
            write_configuration(directory, layout, port),
            port,
            directory / "daemon.log",
            environment,
            poisoned=Poison in options.kinds,
        )
        self._began_s = time.monotonic()
        self._watch = Watch(self.service, self._now_s)
        clock = directory / "wall_clock.offset"
        self._arena = Arena(
            *(self.service, self._watch, layout, directory / "state", self._now_s),
            clock=clock if clock.exists() else None,
            hosts=hosts,
        )
        self._layout = layout
        model = "toy" if layout.model == "scripted" else "default"
        kind = "pool" if layout.pool else layout.model
        count, lengths = CASES[kind], LENGTHS[kind]
        self._cases = make_cases(options.seed, model, count, lengths, options.prompts)
        self._undisturbed: dict[tuple[str, bool, str], ClientAnswer] = {}
        self._numbers = itertools.count()
        self.streams: list[StreamRecord] = []
        self.faults: list[FaultRecord] = []
        self._broken: list[str] = []
        self._held: set[str] = set()
        self._pending = 0

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    async def make(self) -> dict[str, Any]:
        code: int | None = None
        left: list[str] = []
        try:
            self.service.start()
            with self._console.status("starting the daemon"):
                workers = self._layout.replicas * (1 + self._layout.drafts)
                await self.service.wait_ready(workers)
            await self._take_undisturbed()
            self._began_s = time.monotonic()
            await self._break_things()
        finally:
            with self._console.status("stopping the daemon"):
                code, left = await self.service.stop()
        return self._report(code, left)

    async def _take_undisturbed(self) -> None:
        """Answer every case once in either form, before anything is broken; kept by the request.

        A call that is cut by `max_tokens` is told otherwise in a stream, so each form is compared with its own. In a
        pool each group answers, one case at a time.
        """
        groups = list_groups(self.service.url, self._cases[0].body["model"]) if self._layout.pool else [""]
        places = {group: asyncio.Semaphore(1 if group else AT_ONCE) for group in groups}
        with Progress(console=self._console, transient=True) as progress:
            task = progress.add_task("undisturbed answers", total=2 * len(self._cases) * len(groups))
            async with self._open_client() as opened:
                client = ChaosClient(opened, resumes=False)

                async def take(case: Case, group: str, *, streamed: bool) -> None:
                    told = Told()
                    async with places[group]:
                        await client.send(case.ask_group(group), told, stream=streamed)
                    self._undisturbed[case.key, streamed, group] = told.answer
                    progress.advance(task)

                forms = itertools.product(self._cases, groups, (False, True))
                try:
                    await asyncio.gather(*(take(case, group, streamed=form) for case, group, form in forms))
                except StreamBroken as error:
                    raise ChaosError(f"no undisturbed answer: {error}") from error

    def _open_client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.service.url}/v1", api_key="unused")

    async def _break_things(self) -> None:
        shapes = {kind.kind: kind.shape for kind in self._options.kinds}
        turns = self._options.faults
        if turns:
            plan = plan_turns(self._options.seed, shapes, turns, len(self._layout.pool))
        else:
            plan = plan_faults(self._options.seed, shapes, self._options.duration_s)
        await self._watch.look()
        watching = [
            asyncio.create_task(self._watch.run(), name="watch"),
            asyncio.create_task(self.service.keep(self._now_s), name="keep"),
            asyncio.create_task(self._show_progress(len(plan)), name="progress"),
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for lane in range(self._layout.streams):
                    group.create_task(self._send_one_after_another(lane))
                self._pending = len(plan)
                for planned in plan:
                    task = group.create_task(self._strike(planned))
                    task.add_done_callback(self._count_down)
                    if turns:
                        await asyncio.wait([task])
            await asyncio.sleep(SETTLE_S)
            await self._watch.look()
        finally:
            for task in watching:
                task.cancel()
            for task in watching:
                with suppress(asyncio.CancelledError):
                    await task

    def _count_down(self, _: asyncio.Task[None]) -> None:
        self._pending -= 1

    async def _send_one_after_another(self, lane: int) -> None:
        """Be one client: send requests until the time is over, and every fault that struck."""
        drawn = random.Random(f"client {self._options.seed} {lane}")  # noqa: S311  # which comes when is no secret
        async with self._open_client() as opened:
            while self._now_s() < self._options.duration_s or self._pending:
                case = drawn.choice(self._cases)
                streamed = drawn.random() < STREAMED_SHARE
                await self._send(
                    opened, StreamRecord(next(self._numbers), lane, case.name, streamed, self._now_s()), case
                )
                await asyncio.sleep(drawn.uniform(0.0, THINK_S))

    async def _send(self, opened: AsyncOpenAI, stream: StreamRecord, case: Case) -> None:
        self.streams.append(stream)
        told = Told()

        def note_token() -> None:
            if stream.streamed:
                stream.times_s.append(self._now_s())

        client = ChaosClient(opened, KillDaemon in self._options.kinds, note_token)
        try:
            await client.send(case, told, stream=stream.streamed)
        except StreamBroken as error:
            stream.error = str(error)
        stream.ended_s = self._now_s()
        stream.resumes = told.resumes
        self._compare(stream, case, told.answer)

    def _compare(self, stream: StreamRecord, case: Case, answer: ClientAnswer) -> None:
        undisturbed = self._undisturbed[case.key, stream.streamed, self._find_group(answer)]
        stream.changes, stream.unmarked = len(answer.marks), not (stream.error or answer.is_marked)
        if stream.changes:
            self._compare_changed(stream, case, answer, undisturbed)
            return
        units, expected = answer.units(case), undisturbed.units(case)
        stream.tokens = len(units) if answer.completion_tokens is None else answer.completion_tokens
        if stream.error and not units:
            stream.unfinished_tokens = len(expected)
            return
        stream.difference = answer.compare(case, undisturbed, whole=not stream.error)
        if stream.error:
            stream.unfinished_tokens = max(0, len(expected) - len(units))
        if stream.difference:
            stream.first_difference = describe_difference(expected, units, answer, undisturbed)

    def _find_group(self, answer: ClientAnswer) -> str:
        """Return the group that an answer began in, any where it never began; "" where all replicas are alike."""
        known = [group for _, _, group in self._undisturbed]
        return answer.groups[0] if known[0] and answer.groups else known[0]

    def _compare_changed(self, stream: StreamRecord, case: Case, answer: ClientAnswer, own: ClientAnswer) -> None:
        """Compare what an answer has of its first group with that group's; of the rest count the tokens."""
        stream.tokens = answer.completion_tokens or 0
        stream.difference = answer.keep_own(case).compare(case, own, whole=False)
        if case.body.get("ignore_eos") and not stream.error:
            more = stream.tokens - int(case.body["max_tokens"])
            stream.difference += Difference(lost=max(0, -more), doubled=max(0, more))
        if stream.difference:
            stream.first_difference = f"{len(answer.marks)} changes of group: {answer.text[:_SHOWN_CHARS]!r}"

    async def _strike(self, planned: PlannedFault) -> None:
        """Make one fault, heal it, and wait until its victims serve again."""
        record = FaultRecord(planned.number, planned.kind, planned.at_s)
        self.faults.append(record)
        fault = KINDS[planned.kind](self._arena, planned, record)
        record.disrupts = fault.disrupts
        await asyncio.sleep(max(0.0, planned.at_s - self._now_s()))
        if fault.group in self._held:
            record.skipped = f"another fault of {fault.group} still holds"
            return
        held = {fault.group} - {""}
        self._held |= held
        record.began_s = self._now_s()
        try:
            await fault.inject()
            await fault.hold()
            await fault.heal()
        except NoTarget as error:
            record.skipped, record.began_s = str(error), None
            return
        except Exception as error:  # a fault that cannot be made spoils its own row, not a run of fifteen minutes
            record.skipped = f"the tool failed: {type(error).__name__}: {error}"
            self._broken.append(f"{planned.kind}: {record.skipped}")
        finally:
            self._held -= held
        record.healed_s = self._now_s()
        if not record.victims:
            record.cleared_s = record.healed_s
        elif await self._watch.until_ready(record.victims, fault.gone, READY_LIMIT_S):
            record.cleared_s = self._now_s()
            record.ready_after_s = round(record.cleared_s - record.began_s, 3)

    async def _show_progress(self, planned: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("", total=self._options.duration_s)
            while True:
                injected = sum(fault.began_s is not None for fault in self.faults)
                ended = [stream for stream in self.streams if math.isfinite(stream.ended_s)]
                errors = sum(bool(stream.error) for stream in ended)
                wrong = sum(bool(stream.difference) for stream in ended)
                text = f"{injected} of {planned} faults, {len(ended)} streams, {errors} errors, {wrong} that differ"
                progress.update(task, completed=min(self._now_s(), self._options.duration_s), description=text)
                await asyncio.sleep(_REDRAW_S)

    def _report(self, code: int | None, left: list[str]) -> dict[str, Any]:
        for fault in self.faults:
            if fault.began_s is not None:
                found = records.measure_recovery(fault.began_s, self.streams)
                fault.recovery_s = None if found is None else round(found, 3)
        restarts = self._watch.restarts
        summary = records.summarise(self.faults, self.streams, restarts)
        alarms = records.find_false_alarms(restarts, self.faults)
        return {
            "summary": summary,
            "kinds": records.summarise_kinds(self.faults, self.streams),
            "skipped": self._options.skipped,
            "broken": self._broken,
            "faults": [{"description": KINDS[fault.kind].description, **asdict(fault)} for fault in self.faults],
            "streams": [stream_row(stream, records.kinds_met(stream, self.faults)) for stream in self.streams],
            "restarts": [asdict(restart) for restart in restarts],
            "false_alarms": [asdict(alarm) for alarm in alarms],
            "daemon": {
                "exit_code": code,
                "left_behind": left,
                "unasked_ends": [{"at_s": round(at_s, 3), "code": number} for at_s, number in self.service.exits],
                "adopted_workers": self._watch.adopted,
                "warnings": read_warnings(self.service.log),
            },
            "environment": {
                "outrider": version("outrider"),
                "python": platform.python_version(),
                "processor": processor().name,
                "cpus": processor().physical_cores,
                "seed": self._options.seed,
                "duration_s": self._options.duration_s,
                **{name: getattr(self._layout, name) for name in ("model", "runtime", "replicas", "drafts", "streams")},
            },
        }


def describe_difference(
    expected: Sequence[str], found: Sequence[str], answer: ClientAnswer, undisturbed: ClientAnswer
) -> str:
    if not compare_tokens(expected, found):
        return (
            f"ended with {answer.finish} after {answer.completion_tokens} tokens instead of "
            f"{undisturbed.finish} after {undisturbed.completion_tokens}"
        )
    place = next(_places_of_difference(expected, found))
    here, there = "".join(found[place:])[:_SHOWN_CHARS], "".join(expected[place:])[:_SHOWN_CHARS]
    return f"at {place} of {len(expected)}: {here!r} instead of {there!r}"


def _places_of_difference(expected: Sequence[str], found: Sequence[str]) -> Iterator[int]:
    for place, (left, right) in enumerate(zip(expected, found, strict=False)):
        if left != right:
            yield place
    yield min(len(expected), len(found))
