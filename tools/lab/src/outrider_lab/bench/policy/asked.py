"""What is asked for, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from orchestrator.config.load import default_config_path, load_config
from orchestrator.fitting.worker_options import engine_options
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.worker.measuring.canary_aside import leave_out_canary
from orchestrator.worker.measuring.prompts import PromptText
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.policy.drafters import with_suffix_alone
from outrider_lab.bench.policy.requests import choose_categories
from outrider_lab.bench.policy.session import VisitPlan

CONCURRENCIES = (1, 2, 4, 8, 16)
SAMPLED = (1, 4, 16)


def plan_of(
    texts: Sequence[PromptText],
    categories: Sequence[str] | None,
    concurrencies: Sequence[int] | None,
    sampled: Sequence[int] | None,
    *,
    limit: int,
    tokens: int,
    seed: int,
) -> VisitPlan:
    """Return what is visited. Raises BenchError."""
    loads = sorted(set(concurrencies or CONCURRENCIES))
    wanted = sorted(set(sampled)) if sampled else [count for count in SAMPLED if count in loads]
    for count in wanted:
        if count not in loads:
            raise BenchError(f"--sample {count} is none of the concurrencies: {', '.join(map(str, loads))}")
    return VisitPlan(choose_categories(texts, categories or []), loads, wanted, limit, tokens, seed)


def read_policy_options(config: Path | None, most_running: int) -> EngineOptions:
    """Return the options of a target for so many requests at once. Raises what reading a configuration raises, and
    BenchError where it drafts nothing from the text itself."""
    path = config or default_config_path()
    options = with_suffix_alone(engine_options(leave_out_canary(load_config(path)), path.resolve().parent))
    return msgspec.structs.replace(options, max_running=max(most_running, options.max_running))
