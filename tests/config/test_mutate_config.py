"""Broken configuration files: each is taken or refused with its place, and none is a crash."""

from __future__ import annotations

import random
from pathlib import Path

from orchestrator.config.load import load_text
from tests.config.mutate_config import SECRETS, Found, judge, mutate, read_examples, run


def test_mutants_are_taken_or_refused_with_their_place() -> None:
    found = run(150, seed=7)
    assert found.crashes == []
    assert found.taken + found.refused == 150
    assert found.taken > 5
    assert len(found.kinds) > 20


def test_the_same_seed_makes_the_same_files_and_secrets_are_among_them() -> None:
    def make(seed: int) -> list[str]:
        rng = random.Random(seed)
        return [mutate(rng, read_examples()) for _ in range(40)]

    assert make(3) == make(3) != make(4)
    assert any(secret in text for text in make(3) for secret in SECRETS)


def test_what_was_a_crash_once_is_refused(tmp_path: Path) -> None:
    path, found = tmp_path / "cluster.yaml", Found()
    simulated = "model: {source: 'simulated:toy', adapter: simulated}\n"
    running = load_text(simulated, path)
    model = "method: model, source: 'simulated:toy', adapter: simulated, process: own"
    for text in (
        f"{simulated}drafts: [{{{model}, workers: {{max: 9999}}}}]\n",
        f"model: {{source: {'a' * 5000}}}\n",
        f"model: {{source: 'redis://user:{SECRETS[2]}@host'}}\n",
        f"{simulated}limits: {{{SECRETS[0]}: {SECRETS[1]}}}\n",
    ):
        judge(text, path, running, found)
    assert found.crashes == []
    assert found.refused == 4
