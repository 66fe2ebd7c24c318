"""What tracing costs a decode loop: rounds without it and with it, in turns, in one process.

    python -m outrider_lab.measure.traces [--part off|on|all] [--turns 20] [--tokens 400] [--json OUT]

Two loops over the simulated model, whose forward takes no time, decode the same requests in turns. The figure is the
median over the turns of (a round of one) / (a round of the other). Real forwards take milliseconds, so `added_us` is
what counts: divide it by the time of your rounds.

Part "off": no request is traced in either loop, so the ratio is the noise. A profile counts the functions of tracing
that a round calls then. Part "on": one loop has requests of which 1 % of the rounds are timed. Its rounds also have
the time in which the daemon makes spans of that; the receiver is not there. A hundredth of what every round costs is
the better figure of 1 % where the machine is not quiet.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from pathlib import Path

from adapters.contract import LoadOptions
from adapters.grammar import GrammarCompiler
from adapters.simulated.model import ToyModel
from adapters.simulated.script import Script
from adapters.tokenizer import Tokenizer
from orchestrator.clock import SystemClock
from orchestrator.daemon.tracing.daemon_tracing import DaemonTracing
from orchestrator.daemon.tracing.export import ExportSettings
from orchestrator.protocol.commands import Submit
from orchestrator.worker.drafting.suffix import SuffixDrafter
from orchestrator.worker.engine.loop import DecodeLoop
from policies.sampling import Sampling, ToleranceGoal
from policies.speculation.adaptive import Adaptive
from policies.speculation.cost_model import TYPICAL, start_cost_model

_SEQUENCES = 4
_US_PER_S = 1_000_000.0
_OF_TRACING = ("round_traces.py", "trace_messages.py", "tracing/requests.py", "tracing/rounds.py", "tracing/context.py")
_NOWHERE = "http://127.0.0.1:9"


def make_loop() -> DecodeLoop:
    """Return a decode loop over the simulated model, with drafts from the text."""
    model = ToyModel(
        Script(), LoadOptions(device="SIM", kv_cache_bytes=256 << 20, max_batch_rows=256, slots=_SEQUENCES)
    )
    return DecodeLoop(
        model,
        SuffixDrafter(max_match=16, memory_bytes=8 << 20, clock=SystemClock()),
        SystemClock(),
        policy=Adaptive(start_cost_model(TYPICAL)),
        max_running=_SEQUENCES,
        max_depth=8,
        max_itl_ms=200.0,
        prefix_reuse=False,
        tolerance=ToleranceGoal(acceptance_rate=0.9, warmup_tokens=64, max_delta=2.0),
        grammars=GrammarCompiler(Tokenizer.bytes_only, model.spec.vocabulary_size),
    )


class Side:
    """One of the two loops. `share`: of its rounds that are timed; None where no request is traced."""

    def __init__(self, share: float | None) -> None:
        self._loop = make_loop()
        self._share = share
        self._asked = 0
        self._tracing: DaemonTracing | None = None
        if share is not None:
            settings = ExportSettings(_NOWHERE, "bench", "0", 1.0, metrics=False)
            self._tracing = DaemonTracing(settings, share, SystemClock())

    def run_turn(self, tokens: int) -> float:
        """Decode a few requests to their ends; return the seconds of processor time of a round, with the
        daemon's spans of it, without their export."""
        ended = []
        for number in range(_SEQUENCES):
            self._asked += 1
            submit = Submit(f"r{self._asked}", list(b"the sea is " * 4), tokens, Sampling(seed=number))
            if self._tracing is not None:
                trace = self._tracing.begin("chat", {})
                submit = trace.mark(submit)
                ended.append(trace)
            self._loop.submit(submit)
        rounds, began_s = 0, time.thread_time()
        while not self._loop.idle:
            done = self._loop.run_round()
            if self._tracing is not None:
                self._tracing.observe_round("toy", done)
            rounds += 1
        took_s = time.thread_time() - began_s
        for trace in ended:
            trace.end(200)
        return took_s / rounds

    def close(self) -> None:
        """End what sends spans."""
        if self._tracing is not None:
            self._tracing.begin_close().wait()


def compare(share: float | None, turns: int, tokens: int) -> dict[str, float]:
    """Return the median ratio of rounds with this share of them timed to plain ones, and what that adds to a round."""
    plain, traced = Side(None), Side(share)
    ratios, added_us = [], []
    for turn in range(turns + 1):
        first, second = (plain, traced) if turn % 2 else (traced, plain)
        times_s = {first: first.run_turn(tokens), second: second.run_turn(tokens)}
        if turn:  # the first warms up
            ratios.append(times_s[traced] / times_s[plain])
            added_us.append((times_s[traced] - times_s[plain]) * _US_PER_S)
    traced.close()
    return {"ratio": statistics.median(ratios), "added_us": statistics.median(added_us)}


def count_calls(tokens: int) -> dict[str, float]:
    """Return how often functions of tracing are called in a round where no request is traced."""
    side = Side(None)
    profile = cProfile.Profile()
    profile.runcall(side.run_turn, tokens)
    found = pstats.Stats(profile).get_stats_profile().func_profiles
    rounds = int(found["run_round"].ncalls)
    names = [name for name, one in found.items() if one.file_name.endswith(_OF_TRACING)]
    return {name: int(found[name].ncalls) / rounds for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("off", "on", "all"), default="all")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found: dict[str, object] = {}
    if asked.part != "on":
        found["off"] = compare(None, asked.turns, asked.tokens)
        found["calls_per_round_off"] = count_calls(asked.tokens)
    if asked.part != "off":
        found["on_1_percent"] = compare(0.01, asked.turns, asked.tokens)
        found["on_every_round"] = compare(1.0, asked.turns, asked.tokens)
    text = json.dumps(found, indent=2)
    print(text)
    if asked.json is not None:
        asked.json.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
