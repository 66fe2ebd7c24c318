"""Outputs of the configured target, for the replay: greedy, or drawn with seeds by the coupled rule."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from device_profiles.profile import Exactness
from outrider_lab.bench.errors import BenchError
from orchestrator.config.load import load_config
from orchestrator.loading.drafters import build_drafter
from orchestrator.loading.engine import build_loop
from orchestrator.loading.models import load_target
from orchestrator.loading.options import EngineOptions, engine_options
from orchestrator.recommend.decode import read_prompts
from orchestrator.recommend.record import Prompt
from orchestrator.workers.messages import Sampling, Submit
from outrider_lab.token_trees.candidates import RecordedOutput

_TOGETHER = 12


def record_outputs(
    config: Path, prompts: Path, *, limit: int, max_tokens: int, temperature: float, tell: Callable[[int], None]
) -> list[RecordedOutput]:
    """Let the target answer `limit` prompts, spread over the categories. Those that it refuses are left out. Raises
    BenchError, and what loading raises."""
    options = _options(config)
    target = load_target(options, lambda _stage, _fraction: None)
    loop = build_loop(target, options, build_drafter(options, target))
    waiting: deque[Prompt] = deque(read_prompts(prompts, target, limit))
    running: dict[str, RecordedOutput] = {}
    done: list[RecordedOutput] = []
    while waiting or running:
        while waiting and len(running) < _TOGETHER:
            prompt = waiting.popleft()
            sampling = Sampling(temperature, seed=len(done) + len(running))
            submit = Submit(prompt.key, prompt.tokens, max_tokens, sampling, stop_tokens=prompt.stop_tokens)
            if loop.submit(submit) is None:
                running[prompt.key] = RecordedOutput(prompt.key, prompt.category, prompt.tokens, [])
        if not running:
            break
        for delta in loop.run_round_strictly().deltas:
            running[delta.request_id].tokens.extend(delta.tokens)
            if delta.finish:
                done.append(running.pop(delta.request_id))
        tell(len(done))
    target.model.close()
    if not done:
        raise BenchError(f"{prompts}: no prompt fits the target's context")
    return done


def _options(path: Path) -> EngineOptions:
    """Return the configured target's options, for requests whose last bits do not matter."""
    read = load_config(path)
    changes = {
        "model": read.model.model_copy(update={"exactness": Exactness.KERNEL}),
        "limits": read.limits.model_copy(update={"max_running": _TOGETHER}),
        "drafts": [draft for draft in read.drafts if draft.method == "suffix"],
    }
    return engine_options(read.model_copy(update=changes), path.resolve().parent)


def save_outputs(outputs: list[RecordedOutput], path: Path) -> None:
    """Write what `load_outputs` reads. Raises OSError."""
    path.write_bytes(msgspec.json.encode(outputs))
