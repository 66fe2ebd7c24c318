"""What rounds cost on this machine, as `outrider profile` measures it: one profile for each number of threads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from device_profiles.cost import StepCost
from device_profiles.measured import MeasuredModel
from orchestrator.config.load import load_config
from orchestrator.planning.profiling.work import profile_store
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.policy.recorder import with_overhead

_WITHIN_S = 900.0


def measure_profiles(config: Path, runtime: str, threads: Sequence[int], *, seconds: float) -> dict[int, MeasuredModel]:
    """Return the target's profile on the CPU by threads; what is stored already is taken. Raises BenchError."""
    counts = [part for count in threads for part in ("--threads", str(count))]
    command = [sys.executable, "-m", "orchestrator.cli.entry", "profile", "--config", str(config)]
    done = subprocess.run(
        [*command, "--device", f"{runtime}:CPU", "--seconds", str(seconds), *counts],
        capture_output=True,
        text=True,
        timeout=_WITHIN_S,
        check=False,
    )
    if done.returncode:
        raise BenchError(f"`outrider profile` failed: {done.stderr.strip().splitlines()[-1:]}")
    known = profile_store(load_config(config)).models()
    found = {one.threads: one for one in known if (one.role, one.adapter) == ("target", runtime)}
    missing = [count for count in threads if count not in found]
    if missing:
        raise BenchError(f"`outrider profile` kept no profile of {missing[0]} threads")
    return {count: found[count] for count in threads}


def find_round_cost(profile: MeasuredModel) -> StepCost:
    """Return what a round takes by a profile, drafting left out. Prompts cost what they do without it."""
    return replace(with_overhead(profile.cost, profile.overhead), prefill=profile.cost.prefill or profile.cost)
