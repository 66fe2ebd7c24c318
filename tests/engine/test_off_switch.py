"""Speculation that is switched off verifies no draft, of whatever drafter; beside requests that speculate, too."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import pytest

from adapters.tokenizer import Tokenizer
from orchestrator.clock import SystemClock
from orchestrator.protocol.commands import Grammar, Submit
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.port import NO_HINTS, Ask, Draft, Drafter, DraftHints
from orchestrator.worker.drafting.suffix import SuffixDrafter
from policies.sampling import Sampling
from tests.support.daemon import configuration, running
from tests.support.fixed_depth import FixedDepth
from tests.support.loops import decode, grammars_over, loop_over, toy

PROMPT = list(b"the sea is the sea is the sea")


class Eager:
    """A drafter that always proposes, and remembers for whom it was asked."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def begin(self, key: str, tokens: Sequence[int], sampling: Sampling, hints: DraftHints = NO_HINTS) -> None:
        self.asked.add(key)

    def extend(self, key: str, tokens: Sequence[int]) -> None: ...

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self.asked.update(ask.key for ask in asks)
        return [Draft((101,) * ask.limit, (0.99,) * ask.limit) for ask in asks]

    def end(self, key: str, *, keep: bool) -> None: ...

    def memory_bytes(self) -> int:
        return 0

    def states(self) -> list[DrafterState]:
        return []

    def close(self) -> None: ...


def submit(key: str, depth: int | None, grammar: Grammar | None = None) -> Submit:
    return Submit(key, PROMPT, max_tokens=40, sampling=Sampling(temperature=0.7, seed=5), depth=depth, grammar=grammar)


@pytest.mark.parametrize("kind", ["eager", "suffix"])
@pytest.mark.parametrize("grammar", [None, Grammar("regex", "[a-f]{40}")])
def test_depth_0_verifies_no_draft_of_any_drafter(kind, grammar):
    drafter: Drafter = (
        Eager() if kind == "eager" else SuffixDrafter(max_match=16, memory_bytes=1 << 20, clock=SystemClock())
    )
    model = toy()
    grammars = grammars_over(Tokenizer.bytes_only(), model)
    loop = loop_over(model, drafter, grammars=grammars, policy=FixedDepth(4))  # whatever drafting takes here
    asked = [submit(f"off {index}", 0, grammar) for index in range(3)] + [submit("on", None, grammar)]
    tokens, rounds = decode(loop, asked)
    stats = {delta.request_id: delta.stats for round_ in rounds for delta in round_.deltas}
    for request in asked[:3]:
        found = stats[request.request_id]
        assert found is not None
        assert (found.drafted, found.accepted) == (0, 0)
        assert tokens[request.request_id] == tokens["on"]
    speculated = stats["on"]
    assert speculated is not None
    assert speculated.drafted > 0
    assert sum(round_.drafted for round_ in rounds) == speculated.drafted
    if isinstance(drafter, Eager):
        assert drafter.asked == {"on"}


def read_counters(url: str) -> dict[str, float]:
    lines = [line.split(" ") for line in httpx.get(f"{url}/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines if "spec_decode_num" in name and "_created" not in name}


def test_the_switches_of_a_request_and_of_the_operator(tmp_path):
    ask = {"model": "toy", "prompt": "the sea is the sea is", "max_tokens": 60, "temperature": 0}
    chat = {"model": "toy", "messages": [{"role": "user", "content": "the sea the sea"}], "max_tokens": 60}
    with running(configuration(tmp_path)) as daemon:
        httpx.post(f"{daemon.url}/v1/completions", json=ask)
        before = read_counters(daemon.url)
        assert max(before.values()) > 0
        for off in ({"method": "off"}, {"num_speculative_tokens": 0}, {"method": "off", "num_speculative_tokens": 9}):
            for path, body in (("completions", ask), ("chat/completions", chat)):
                answer = httpx.post(f"{daemon.url}/v1/{path}", json=body | {"speculative_config": off}).json()
                assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
                assert answer["metrics"]["speculative_decoding"]["mean_acceptance_length"] == 1.0
        assert read_counters(daemon.url) == before
    (tmp_path / "off").mkdir()
    for switch in ("{method: 'off'}", "{num_speculative_tokens: 0}"):
        with running(configuration(tmp_path / "off", extra=f"speculation: {switch}")) as daemon:
            config = {"speculative_config": {"num_speculative_tokens": 7}}
            answer = httpx.post(f"{daemon.url}/v1/completions", json=ask | config)
            assert answer.status_code == 200
            assert answer.headers["X-Outrider-Speculation"] == "off; by=operator; cut"
            assert max(read_counters(daemon.url).values(), default=0) == 0
            assert daemon.status()["ready"]["drafters"] == []
