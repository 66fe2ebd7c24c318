"""A call that is made again in another way, and a target that is loaded smaller where memory is short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adapters.contract import CapacityError, ModelRefused, OutOfMemory, silent
from orchestrator.config.load import load_config
from orchestrator.fitting.worker_options import engine_options
from orchestrator.protocol.load_options import EngineOptions, ModelOptions
from orchestrator.worker.loading import models
from orchestrator.worker.loading.engine import NOTHING_KNOWN, ready_of
from orchestrator.worker.loading.models import Attempt, LoadedSource, execute_with_fallback, load_target
from tests.support.daemon import configuration


def fail_with(error: Exception) -> Attempt[str]:
    def call() -> str:
        raise error

    return Attempt("a way", call)


def test_the_first_way_that_works_is_taken_and_the_failures_before_it_are_told() -> None:
    found = execute_with_fallback(
        [fail_with(OutOfMemory("full")), fail_with(CapacityError("too small")), Attempt("the last", lambda: "done")],
        (OutOfMemory,),
    )
    assert (found.value, found.title) == ("done", "the last")
    assert found.failed == ("a way: full", "a way: too small")


def test_what_another_way_cannot_help_is_raised_at_once_and_the_first_failure_where_none_helps() -> None:
    with pytest.raises(ModelRefused, match="no such model"):
        execute_with_fallback([fail_with(ModelRefused("no such model")), Attempt("never", lambda: "")], (OutOfMemory,))
    with pytest.raises(OutOfMemory, match="full"):
        execute_with_fallback([fail_with(OutOfMemory("full")), fail_with(CapacityError("tiny"))], (OutOfMemory,))


def options(directory: Path) -> EngineOptions:
    path = configuration(directory, extra="limits: {kv_cache: 64 MiB, max_batch_rows: 512}")
    return engine_options(load_config(path), directory)


def starve(monkeypatch: pytest.MonkeyPatch, most_bytes: int) -> None:
    """Leave a device no memory for larger KV caches."""
    load = models.load_model

    def load_or_fail(wanted: ModelOptions, *others: Any, **named: Any) -> LoadedSource:
        if wanted.kv_cache_bytes > most_bytes:
            raise OutOfMemory(f"no memory for {wanted.kv_cache_bytes} bytes")
        return load(wanted, *others, **named)

    monkeypatch.setattr(models, "load_model", load_or_fail)


def test_a_target_is_loaded_smaller_where_memory_is_short_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = options(tmp_path)
    whole = load_target(wanted, silent)
    whole.model.close()
    starve(monkeypatch, wanted.model.kv_cache_bytes // 2)
    found = load_target(wanted, silent)
    caps = found.model.capabilities
    assert caps.total_blocks == whole.model.capabilities.total_blocks // 2
    assert caps.max_batch_rows == 256
    assert ready_of(found, wanted, 4, 0, NOTHING_KNOWN).device.memory_reduced == [
        f"loading with 64.0 MiB of KV cache and 512 rows a forward: no memory for {wanted.model.kv_cache_bytes} bytes"
    ]
    found.model.close()
    starve(monkeypatch, 0)
    with pytest.raises(OutOfMemory, match=str(wanted.model.kv_cache_bytes)):
        load_target(wanted, silent)
