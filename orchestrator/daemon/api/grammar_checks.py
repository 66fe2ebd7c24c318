"""Whether a grammar can be used: seen before a worker gets it, in a process that may die of it (daemon.sandbox).

Time grows with the square of some schemas' size (5 s for 514 KiB of optional properties), hence the bound on that.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Final, TypeVar

from orchestrator.clock import Clock
from orchestrator.daemon.api.body_work import PATIENCE_S, miss_turn
from orchestrator.daemon.api.tools.grammar import ANSWER_RULE, name_tool
from orchestrator.daemon.api.translate import describe_size
from orchestrator.daemon.sandbox.sandbox import JobEnded, Sandbox
from orchestrator.errors import RequestError
from orchestrator.protocol.commands import Grammar
from orchestrator.side_lane import LARGE_GRAMMAR_BYTES, SideLane

# ADR 0099: a check costs 0.1 ms and its compiling, so this only spares that of schemas that come again.
_REMEMBERED: Final = 256
_PROOF: Final = 2
"""So many ends of its child, and a grammar is refused without another try. ADR 0099."""
# The machine may be another then. ADR 0099. Not tuned.
_PROVEN_S: Final = 60.0
_T = TypeVar("_T")
_RULE: Final = re.compile(r"(\w+): ")


@dataclass(frozen=True, slots=True)
class _Ended:
    """A grammar that ended its child so many times, the last of them at `since_s`."""

    problem: str
    ends: int
    since_s: float


class GrammarChecks:
    """Remembers what it has found, by digest: a client that sends one schema with every request pays once. Small ones
    do not wait behind large ones. What ended its child is tried again later, as that may have been the machine's doing.
    """

    def __init__(self, most_bytes: int, timeout_s: float, sandbox: Sandbox, clock: Clock) -> None:
        self._most_bytes = most_bytes
        self._timeout_s = timeout_s
        self._sandbox = sandbox
        self._small = SideLane("small grammars", gives_way=False)
        self._large = SideLane("large grammars", gives_way=True)
        self._clock = clock
        self._found: dict[bytes, str] = {}
        self._ended: dict[bytes, _Ended] = {}

    def set_bounds(self, most_bytes: int, timeout_s: float) -> None:
        """Bound grammars by these from now on; what took too long before may be tried again."""
        self._most_bytes, self._timeout_s = most_bytes, timeout_s
        self._found.clear()
        self._ended.clear()

    async def check(self, grammar: Grammar, param: str, answer_param: str = "response_format") -> None:
        """Raise RequestError 400 where a grammar cannot be used, naming `param`, or `answer_param` where the schema of
        an answer beside tools is wrong; 429 where its turn does not come in time, and 503 where it cannot be
        tried now."""
        what = "schema" if grammar.kind == "json_schema" else "grammar"
        size = len(grammar.text)
        if size > self._most_bytes:
            raise describe_size(what, size, self._most_bytes, param)
        digest = hashlib.sha256(f"{grammar.kind}\0{grammar.text}".encode("utf-8", "surrogatepass")).digest()
        problem = self._recall(digest)
        if problem is None:
            problem = await self._find_in_turn(digest, grammar)
        if not problem:
            return
        rule = _RULE.match(problem) if grammar.kind == "lark" else None
        tool = name_tool(grammar.text, rule[1]) if rule is not None else ""
        if rule is not None and rule[1] == ANSWER_RULE:
            what, problem, param = "schema", problem[rule.end() :], answer_param
        elif rule is not None and tool:
            what, problem = f"schema of the tool '{tool}'", problem[rule.end() :]
        raise RequestError(f"the {what} cannot be used: {problem}", param=param, code="unsupported_schema")

    async def _find_in_turn(self, digest: bytes, grammar: Grammar) -> str:
        """Return the problem. What has had its turn ends within the bound from there on, so it is waited for."""
        lane = self._large if len(grammar.text) > LARGE_GRAMMAR_BYTES else self._small
        task = lane.submit(self._find_problem, digest, grammar, self._timeout_s)
        waiting = asyncio.wrap_future(task)
        try:
            with lane.going_on(task, PATIENCE_S) if lane is self._small else nullcontext():
                ended, _ = await asyncio.wait([waiting], timeout=self._timeout_s)
                if ended or not task.cancel():
                    return await waiting
        except asyncio.CancelledError:
            task.cancel()  # nobody waits for it any more
            raise
        raise miss_turn("the grammar's turn to be checked", self._timeout_s, self._timeout_s / 2)

    def _find_problem(self, digest: bytes, grammar: Grammar, timeout_s: float) -> str:
        problem = self._recall(digest)  # others may have waited for the same one
        if problem is not None:
            return problem
        try:
            problem = self._sandbox.do("grammar", (grammar.kind, grammar.text), timeout_s)
        except JobEnded as end:
            problem = (
                f"it takes longer than {timeout_s:g} s to compile; send a simpler one"
                if end.too_slow
                else "it takes more memory to compile, or is nested deeper, than a grammar may; send a simpler one"
            )
            before = self._ended.get(digest)
            ends = end.ends + (0 if before is None else before.ends)
            _remember(self._ended, digest, _Ended(problem, ends, self._clock.monotonic_s()))
            return problem
        self._ended.pop(digest, None)
        _remember(self._found, digest, problem)
        return problem

    def _recall(self, digest: bytes) -> str | None:
        problem, ended = self._found.get(digest), self._ended.get(digest)
        if problem is None and ended is not None and ended.ends >= _PROOF:
            proven = self._clock.monotonic_s() - ended.since_s < _PROVEN_S
            return ended.problem if proven else None
        return problem


def _remember(known: dict[bytes, _T], digest: bytes, value: _T) -> None:
    known.pop(digest, None)
    with suppress(KeyError, RuntimeError, StopIteration):  # another thread does the same
        while len(known) >= _REMEMBERED:
            del known[next(iter(known))]
    known[digest] = value
