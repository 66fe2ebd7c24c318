"""Whether a grammar can be used: seen before a worker gets it, off the event loop, within a bound of size and time.

llguidance gives up the GIL while it compiles. Its time grows with the square of some schemas' size (5 s for 514 KiB of
optional properties), hence the bound on that.
"""

from __future__ import annotations

import hashlib

from adapters.grammar import find_grammar_problem
from orchestrator.api.work_lanes import WorkLanes, WorkTooSlow
from orchestrator.errors import RequestError
from orchestrator.workers.messages import Grammar

_REMEMBERED = 256


class GrammarChecks:
    """Remembers what it has found, by digest: a client that sends one schema with every request pays once."""

    def __init__(self, most_bytes: int, timeout_s: float) -> None:
        self._most_bytes = most_bytes
        self._lanes = WorkLanes(timeout_s)
        self._found: dict[bytes, str] = {}

    def set_bounds(self, most_bytes: int, timeout_s: float) -> None:
        """Bound grammars by these from now on; what took too long before may be tried again."""
        self._most_bytes, self._lanes.timeout_s = most_bytes, timeout_s
        self._found.clear()

    async def check(self, grammar: Grammar, param: str) -> None:
        """Raise RequestError, naming `param`, where a grammar cannot be used."""
        what = "schema" if grammar.kind == "json_schema" else "grammar"
        size = len(grammar.text)
        if size > self._most_bytes:
            raise RequestError(
                f"the {what} has {size} bytes; {self._most_bytes} are taken: send a smaller one, or ask the operator "
                "for a larger limits.max_grammar",
                code="schema_too_large",
                param=param,
            )
        digest = hashlib.sha256(f"{grammar.kind}\0{grammar.text}".encode("utf-8", "surrogatepass")).digest()
        found = self._found.get(digest)
        if found is None:
            try:
                found = await self._lanes.do(size, find_grammar_problem, grammar.kind, grammar.text)
            except WorkTooSlow as error:
                found = f"it takes longer than {error.timeout_s:g} s to compile; send a simpler one"
            while len(self._found) >= _REMEMBERED:
                del self._found[next(iter(self._found))]
            self._found[digest] = found
        if found:
            raise RequestError(f"the {what} cannot be used: {found}", param=param, code="unsupported_schema")
