"""Streams that come from a dead worker, many at once, beside streams that run: these keep their pace, and the others
go on in the order in which they came."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field

import numpy as np

from orchestrator.protocol.commands import Submit
from orchestrator.worker.engine.loop import DecodeLoop
from policies.sampling import Sampling
from policies.serving.replay_budget import REPLAY_SHARE
from tests.support.loops import alone, loop_over, toy
from tests.support.simulated_time import SimulatedClock, TimedModel

RUNNING = [f"s{index}" for index in range(4)]
RESUMED = [f"r{index}" for index in range(4)]


def request(key: str, count: int = 200, *, committed: int = 0, max_tokens: int = 2000) -> Submit:
    """A request, `committed` tokens of which came from a worker that died."""
    seed = zlib.crc32(key.encode())
    text = random.Random(seed).choices(range(241), k=count)
    sampling = Sampling(0.7, seed=seed % 1000)
    return Submit(key, text[: count - committed], max_tokens, sampling, committed=text[count - committed :])


@dataclass
class Timed:
    """A loop in simulated time."""

    loop: DecodeLoop
    clock: SimulatedClock
    last_s: dict[str, float] = field(default_factory=dict)
    gaps_ms: list[float] = field(default_factory=list)

    def run(self, until: set[str], *, rounds: int = 5000) -> list[str]:
        """Run until these have had a token; return the order, and keep the gaps of the running streams."""
        seen: list[str] = []
        self.gaps_ms.clear()
        for _ in range(rounds):
            if until <= set(seen):
                break
            for delta in self.loop.run_round().deltas:
                key, now_s = delta.request_id, self.clock.now_s
                if key in RUNNING and key in self.last_s:
                    self.gaps_ms.append((now_s - self.last_s[key]) * 1000.0)
                seen += [] if key in seen else [key]
                self.last_s[key] = now_s
        assert until <= set(seen)
        return seen


def start(*, running: int = 16, max_itl_ms: float = 200.0) -> Timed:
    clock = SimulatedClock()
    model = TimedModel(clock, slots=16)
    return Timed(loop_over(model, None, running=running, clock=clock, max_itl_ms=max_itl_ms), clock)


def time_replay(timed: Timed) -> float:
    """Submit what is to be resumed; return how long it takes until all have a token."""
    came_s = timed.clock.now_s
    for key in RESUMED:
        assert timed.loop.submit(request(key, 800, committed=300)) is None
    order = timed.run(set(RESUMED))
    assert [key for key in order if key in RESUMED] == RESUMED  # the oldest first
    return timed.clock.now_s - came_s


def test_running_streams_keep_their_pace_and_the_resumed_ones_get_on():
    timed = start()
    full_speed_s = time_replay(start())
    for key in RUNNING:
        timed.loop.submit(request(key))
    timed.run(set(RUNNING))
    timed.run(set(RUNNING))
    plain_ms = max(timed.gaps_ms)
    took_s = time_replay(timed)
    gaps_ms = timed.gaps_ms[:]
    timed.run(set(RUNNING))
    after_ms = max(timed.gaps_ms)  # more streams decode now
    assert np.mean(gaps_ms) <= (1.0 + 1.2 * REPLAY_SHARE) * after_ms
    assert max(gaps_ms) <= 2.5 * after_ms + 32 * 1.0  # a chunk's least
    assert np.mean(gaps_ms) > plain_ms  # and the share is used
    assert took_s <= 2.0 * (1.0 + 1.0 / REPLAY_SHARE) * full_speed_s


def test_a_new_prompt_keeps_its_bound_and_its_half_beside_replays():
    timed = start()
    for key in RUNNING:
        timed.loop.submit(request(key))
    timed.run(set(RUNNING))
    for key in RESUMED:
        timed.loop.submit(request(key, 1600, committed=300))
    timed.loop.submit(request("new", 300))
    order = timed.run({"new", *RESUMED})
    assert order.index("new") < order.index(RESUMED[2])
    assert max(timed.gaps_ms) <= 200.0


def test_those_that_were_served_start_before_new_ones_that_wait():
    timed = start(running=2)
    for key in ("s0", "s1"):
        timed.loop.submit(request(key, max_tokens=30))
    assert timed.run({"s0", "s1"}) == ["s0", "s1"]
    for key in ("new0", "new1"):
        timed.loop.submit(request(key, max_tokens=3))
    for key in ("r0", "r1"):
        timed.loop.submit(request(key, committed=50, max_tokens=60))
    order = timed.run({"new0", "new1"})
    assert order == ["s0", "s1", "r0", "r1", "new0", "new1"]  # two at a time


def test_where_all_come_back_together_none_is_held_up_for_the_first():
    together, alone_s = start(), 0.0
    for key in RESUMED:
        one = start()
        came_s = one.clock.now_s
        one.loop.submit(request(key, 800, committed=300))
        one.run({key})
        alone_s += one.clock.now_s - came_s
    assert time_replay(together) <= 1.5 * alone_s


def test_the_order_of_replays_changes_no_token():
    submits = [request(key, 60 + 40 * index, max_tokens=40) for index, key in enumerate((*RUNNING, *RESUMED))]
    out = alone(submits)
    had: dict[str, list[int]] = {key: out[key][:15] if key in RESUMED else [] for key in out}
    loop = loop_over(toy(), None, prefix_reuse=False)
    for number, submit in enumerate(submits):
        known = had[submit.request_id][:]
        loop.submit(Submit(submit.request_id, submit.prompt, 40, submit.sampling, committed=known))
        for delta in loop.run_round().deltas if number >= 3 else ():
            had[delta.request_id] += delta.tokens
    while not loop.idle:
        for delta in loop.run_round().deltas:
            had[delta.request_id] += delta.tokens
    assert had == out
