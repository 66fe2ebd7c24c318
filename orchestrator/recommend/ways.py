"""Several ways to decode the same requests, in turn, in one process: what the machine does meets all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.protocol.commands import Submit
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.recommend.record import ModeRun, measure_decoding
from orchestrator.worker.drafting.port import Drafter
from orchestrator.worker.loading.engine import build_loop
from orchestrator.worker.loading.models import LoadedSource


@dataclass(frozen=True, slots=True)
class Way:
    """One way to decode. Its drafter (None: plain decoding) drafts for all requests, as in a server."""

    name: str
    options: EngineOptions
    drafter: Drafter | None = None


def decode_in_turns(
    target: LoadedSource, ways: Sequence[Way], submits: Sequence[Submit], tell: Callable[[int], object]
) -> dict[str, ModeRun]:
    """Decode every request in every way, one at a time; each way comes first, and last, as often as the others. Each
    has one loop, which learns what rounds cost, as a server's does.

    `tell` hears how many requests are done. Raises OutriderError for a request that is refused.
    """
    runs = {way.name: ModeRun("spec" if way.drafter is not None else "plain") for way in ways}
    loops = {way.name: build_loop(target, way.options, way.drafter) for way in ways}
    for number, submit in enumerate(submits):
        turn = number % len(ways)
        for way in (*ways[turn:], *ways[:turn]):
            measure_decoding(loops[way.name], [submit], runs[way.name])
        tell(number + 1)
    return runs


def close_drafters(ways: Sequence[Way]) -> None:
    """Close the drafters, the last one first: OpenVINO gives each model a signal stack, and takes them back right in
    that order only."""
    for way in reversed(ways):
        if way.drafter is not None:
            way.drafter.close()
