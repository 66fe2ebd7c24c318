"""What follows a worker that had too much memory: one that is asked to have less."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.daemon.control.actions import StartWorker
from orchestrator.daemon.control.replicas.worker_life import Loss, WorkerLife, WorkerLives
from orchestrator.protocol.contract import MEMORY_SHARE, WorkerSpec
from orchestrator.protocol.events import Failed
from policies.models.kv_shares import SHARES
from policies.serving.failover.blame import LOSS_KINDS, LossKind
from tests.api.support import READY
from tests.support.ready import change_ready

KILLED = "worker target was killed for want of memory"


def begin() -> WorkerLife:
    life = WorkerLives(5).create(WorkerSpec("target", "no:where", {"model": 1}), "worker target")
    life.begin()
    life.observe_start("pid 1", 0.0)
    return life


def lose(life: WorkerLife, kind: LossKind, *, hopeless: bool = False, longest_tokens: int = 0) -> Loss:
    life.observe_ending()
    loss = life.observe_end(KILLED, kind, 1.0, hopeless=hopeless, longest_tokens=longest_tokens)
    life.observe_start("pid 2", 1.0)
    return loss


def share_of(loss: Loss) -> int:
    (start,) = [one for one in loss.actions if isinstance(one, StartWorker)]
    assert start.spec.options["model"] == 1
    return int(start.spec.options.get(MEMORY_SHARE, 1))


def test_each_try_after_the_kernel_killed_a_worker_asks_for_less_and_the_last_is_the_end() -> None:
    life = begin()
    first = lose(life, "memory", hopeless=True)
    assert share_of(first) == 2
    assert first.restart.endswith("with half of its KV cache")
    assert share_of(lose(life, "memory", hopeless=True)) == 4
    last = lose(life, "memory", hopeless=True)
    assert last.failure == f"{KILLED}; it had a quarter of its KV cache already"
    assert not last.actions


def test_one_that_served_is_never_given_up_and_another_end_brings_the_configured_size_back() -> None:
    life = begin()
    life.observe_event(READY, 0.5)
    assert [share_of(lose(life, "memory")) for _ in range(3)] == [2, 4, 4]
    assert share_of(lose(life, "crashed")) == 1


def test_a_device_that_ran_out_of_memory_under_a_worker_that_served_is_asked_for_less() -> None:
    life = begin()
    life.observe_event(READY, 0.5)
    life.observe_event(Failed("no memory", restartable=True, kind="out_of_memory"), 0.6)
    assert share_of(lose(life, "killed")) == 2


def test_what_a_worker_found_by_itself_counts() -> None:
    life = begin()
    life.observe_event(change_ready(READY, memory_reduced=["loading with all of it: no memory"]), 0.5)
    assert share_of(lose(life, "memory")) == 4


@pytest.mark.parametrize(("longest", "share"), [(64, 2), (65, 1)])
def test_a_stream_that_needs_the_whole_cache_keeps_it(longest: int, share: int) -> None:
    life = begin()
    life.observe_event(READY, 0.5)
    assert READY.kv.blocks * READY.kv.block_tokens == 128
    assert share_of(lose(life, "memory", longest_tokens=longest)) == share


@given(st.lists(st.tuples(st.sampled_from(LOSS_KINDS), st.booleans(), st.integers(0, 200)), max_size=12))
def test_the_size_only_shrinks_for_memory_and_never_below_the_last_part(
    ends: list[tuple[LossKind, bool, int]],
) -> None:
    life = begin()
    for kind, ready, longest in ends:
        before = life.memory_share
        if ready:
            life.observe_event(change_ready(READY, memory_reduced=["smaller"] * SHARES.index(before)), 0.5)
        share = share_of(lose(life, kind, longest_tokens=longest))
        assert share in SHARES
        assert share == 1 if kind != "memory" else share >= before
