"""Grammars compile beside the command thread: cancels, stops and other requests pass by while one does.

The library gives up the GIL while it compiles. Small grammars do not wait behind large ones. A client's grammar comes
here after the daemon's sandbox has compiled it, in less stack and in bounded time and memory. So what takes too long
here, over the model's own tokens and behind the decode loop, ends by itself.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from orchestrator.protocol.commands import Grammar, Submit
from orchestrator.protocol.rounds import Refused
from orchestrator.side_lane import SideLane

LARGE_BYTES = 8 * 1024
STACK_BYTES = 8 * 1024 * 1024
"""Four times what the sandbox has (orchestrator.daemon.sandbox.nursery): what it compiles does not overflow here."""


@dataclass(slots=True, eq=False)
class _Job:
    request: Submit
    arrived_s: float
    task: Future[None] | None = None


class CompileLanes:
    """`compile_grammar` does the work. A request whose grammar is there goes to `accept` with the time of its arrival;
    one whose grammar takes longer than `timeout_s` goes to `refuse`. Both are called in another thread."""

    def __init__(
        self,
        compile_grammar: Callable[[Submit], None],
        accept: Callable[[Submit, float], None],
        refuse: Callable[[Refused], None],
        timeout_s: float,
    ) -> None:
        self._compile_grammar = compile_grammar
        self._accept = accept
        self._refuse = refuse
        self._timeout_s = timeout_s
        self._changing = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._small = SideLane("small grammars", gives_way=True, stack_bytes=STACK_BYTES)
        self._large = SideLane("large grammars", gives_way=True, stack_bytes=STACK_BYTES)

    def warm_up(self) -> None:
        """Load what every grammar needs, so that the first one does not wait for that. To be called while nothing else
        runs: the tokenizer's library keeps the GIL."""
        try:
            self._compile_grammar(Submit("", [], 0, grammar=Grammar("regex", "a")))
        except Exception:  # whoever needs a grammar is told
            traceback.print_exc()

    def add(self, request: Submit, arrived_s: float) -> None:
        """Take in a request with a grammar."""
        job = _Job(request, arrived_s)
        with self._changing:
            self._jobs[request.request_id] = job
            job.task = self._lane_of(request).submit(self._compile, job)

    def cancel(self, request_id: str) -> None:
        """Drop a request whose grammar is not there yet. Others are not known here."""
        with self._changing:
            job = self._jobs.pop(request_id, None)
        if job is not None and job.task is not None:
            job.task.cancel()

    def _lane_of(self, request: Submit) -> SideLane:
        text = request.grammar.text if request.grammar is not None else ""
        return self._large if len(text) > LARGE_BYTES else self._small

    def _compile(self, job: _Job) -> None:
        alarm = threading.Timer(self._timeout_s, self._give_up, (job,))
        alarm.daemon = True
        alarm.start()
        try:
            self._compile_grammar(job.request)
        except Exception:  # one request is lost, not the worker with all of them
            traceback.print_exc()
            self._end(job, "the grammar could not be compiled; the log says why", "failed")
        finally:
            alarm.cancel()
        with self._changing:
            if self._take(job):
                self._accept(job.request, job.arrived_s)

    def _give_up(self, job: _Job) -> None:
        if job.task is not None:
            self._lane_of(job.request).leave_behind(job.task)
        self._end(job, f"the grammar takes longer than {self._timeout_s:g} s to compile; send a simpler one", "invalid")

    def _end(self, job: _Job, message: str, kind: str) -> None:
        with self._changing:
            if self._take(job):
                self._refuse(Refused(job.request.request_id, message, kind))

    def _take(self, job: _Job) -> bool:
        """Forget a request that waits here; False where it was cancelled or refused."""
        if self._jobs.get(job.request.request_id) is not job:
            return False
        del self._jobs[job.request.request_id]
        return True
