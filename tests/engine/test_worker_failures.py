"""What a worker says of its end, and of files that rot while it serves."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from adapters.contract import (
    AdapterError,
    AdapterUnavailable,
    CapacityError,
    DeviceLost,
    MemoryCorrupt,
    ModelRefused,
    OutOfMemory,
    Overheated,
    RuntimeFailed,
    Unsupported,
)
from adapters.hf_hub import DownloadFailed
from adapters.model_source import ModelSource
from adapters.model_store import ModelStore, StoreFull, StoreUnwritable
from orchestrator.clock import SystemClock
from orchestrator.daemon.control.event_log import log_changes
from orchestrator.daemon.control.state import add_gauges
from orchestrator.protocol.commands import Cancel, Grammar, Retune, Stop, Submit
from orchestrator.protocol.events import Event, Failed, Retuned, StillWorking
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Delta, Gauges, Refused, RoundReport
from orchestrator.worker.engine.kv_transfer.mover import KvMover
from orchestrator.worker.engine.variants import SpeculationVariants, VariantDepth
from orchestrator.worker.engine.worker_engine import COMPILE_TIMEOUT_S, LoadedEngine, WorkerEngine
from orchestrator.worker.loading.artefact_watch import ArtefactWatch, WatchPace
from tests.adapters.test_model_store import CopyRecipe, Said, rot
from tests.support.engines import ScriptedEngine
from tests.support.failing import FailingModel
from tests.support.loops import END, alone, loop_over, requests, toy


class Ender(FailingModel):
    """Raises at a forward."""

    def __init__(self, error: BaseException, at: int) -> None:
        super().__init__(toy())
        self._error, self._left = error, at

    def forward(self, batch):
        self._left -= 1
        if self._left < 0:
            raise self._error
        return super().forward(batch)


@contextmanager
def engine_over(
    model: Any, watch: Any = None, retuner: Any = None
) -> Iterator[tuple[WorkerEngine, Callable[[], Event]]]:
    """A running engine, and its events one after the other."""
    loop = loop_over(model, None)
    variants = SpeculationVariants(VariantDepth(0, False), {}, None)
    ready: Ready = ScriptedEngine()._ready()
    loaded = LoadedEngine(
        *(loop, ready, lambda: None, lambda command: None, variants, KvMover(model, "")), watch, retuner
    )
    engine = WorkerEngine(lambda emit: loaded, SystemClock())
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    thread = threading.Thread(target=engine.run, args=(events.put,), daemon=True)
    thread.start()
    yield engine, lambda: events.get(timeout=180)
    engine.submit(Stop())
    thread.join(30)
    assert not thread.is_alive()


def until(next_event: Callable[[], Event], kind: type, into: list[Event] | None = None) -> Any:
    while not isinstance(event := next_event(), kind):
        if into is not None:
            into.append(event)
    return event


def test_a_first_grammar_beside_a_stream_is_announced_before_all_threads_fall_silent() -> None:
    grammar = Grammar("regex", "ab*c")
    with engine_over(toy(script="base_ms=20")) as (engine, next_event):
        until(next_event, Gauges)
        engine.submit(requests(1)[0])
        until(next_event, RoundReport)
        engine.submit(Submit("bound", [60, 32], 8, grammar=grammar, stop_tokens=[END]))
        engine.submit(Submit("left", [60, 32], 8, grammar=grammar, stop_tokens=[END]))
        engine.submit(Cancel("left"))
        before: list[Event] = []
        working = until(next_event, StillWorking, before)
        assert working.pulse.expected_ms == 1000.0 * COMPILE_TIMEOUT_S
        heard = [delta for event in before if isinstance(event, RoundReport) for delta in event.deltas]
        while not any(delta.request_id == "bound" and delta.finish for delta in heard):
            heard += until(next_event, RoundReport).deltas
        assert bytes(find_tokens(heard, "bound")).startswith(b"a")
        assert not find_tokens(heard, "left")


def find_tokens(deltas: list[Delta], key: str) -> list[int]:
    return [token for delta in deltas if delta.request_id == key for token in delta.tokens if token < END]


class Unready:
    """Takes other options in, and fails while it loads what they need."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def prepare(self, options: dict[str, Any]) -> Callable[[], Ready]:
        raise self._error

    def choose(self, names: Collection[str] | None) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "told"),
    [(MemoryError(), "MemoryError"), (RuntimeError("odd"), "odd"), (AdapterError(""), "AdapterError")],
)
def test_other_options_that_cannot_be_prepared_leave_the_worker_as_it_was(error: Exception, told: str) -> None:
    with engine_over(toy(), retuner=Unready(error)) as (engine, next_event):
        for _ in range(2):  # it goes on
            engine.submit(Retune({}))
            assert until(next_event, Retuned) == Retuned(None, told)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OutOfMemory("no room"), "out_of_memory"),
        (MemoryError("no room"), "out_of_memory"),
        (DeviceLost("gone"), "device_lost"),
        (MemoryCorrupt("flipped"), "ecc"),
        (Overheated("hot"), "thermal"),
        (RuntimeFailed("odd"), "unknown"),
        (CapacityError("no block"), "unknown"),
        (Unsupported("a mistake of ours"), "unknown"),
        (AdapterError("odd"), "unknown"),
    ],
)
def test_whatever_ends_a_round_is_told_with_its_kind_and_a_new_worker_may_help(error, kind):
    submits = requests(3)
    expected = alone(submits)
    out: dict[str, list[int]] = {one.request_id: [] for one in submits}
    with engine_over(Ender(error, 20)) as (engine, next_event):
        for one in submits:
            engine.submit(one)
        seen: list[Event] = []
        failed = until(next_event, Failed, seen)
    assert failed.restartable
    assert failed.kind == kind
    assert str(error) in failed.message
    for event in seen:
        for delta in event.deltas if isinstance(event, RoundReport) else ():
            out[delta.request_id] += delta.tokens
    assert all(tokens == expected[key][: len(tokens)] for key, tokens in out.items())
    assert any(out.values())


@pytest.mark.parametrize(
    ("error", "kind", "restartable"),
    [
        (ModelRefused("odd file"), "configuration", False),
        (Unsupported("no such device"), "configuration", False),
        (AdapterUnavailable("pip install"), "not_installed", False),
        (StoreFull("no room"), "storage", True),
        (StoreUnwritable("not ours"), "storage", True),
        (DownloadFailed("no network"), "network", True),
        (OutOfMemory("no room"), "out_of_memory", True),
        (DeviceLost("gone"), "device_lost", True),
        (AdapterError("odd"), "unknown", True),
    ],
)
def test_what_can_never_be_loaded_is_not_tried_again(error, kind, restartable):
    def load(emit):
        raise error

    events: list[Event] = []
    WorkerEngine(load, SystemClock()).run(events.append)
    assert events == [Failed(str(error), restartable, kind)]


def test_a_bad_row_is_told_once_and_the_worker_serves_on():
    submits = [Submit(str(index), [60 + index, 32, 101] * 3, 12) for index in range(3)]
    submits[1].prompt[4] = 7
    expected = alone(submits)
    with engine_over(toy(script="garbage=7")) as (engine, next_event):
        for one in submits:
            engine.submit(one)
        seen: list[Event] = []
        refused = until(next_event, Refused, seen)
        assert (refused.request_id, refused.kind) == ("1", "not_finite")
        done: set[str] = set()
        while done != {"0", "2"}:
            seen.append(next_event())
            done |= {d.request_id for e in seen if isinstance(e, RoundReport) for d in e.deltas if d.finish}
        gauges = until(next_event, Gauges, seen)
    assert gauges.not_finite == 1
    assert not any(isinstance(event, Refused | Failed) for event in seen)
    got: dict[str, list[int]] = {"0": [], "2": []}
    for event in seen:
        for delta in event.deltas if isinstance(event, RoundReport) else ():
            got[delta.request_id] += delta.tokens
    assert got == {key: expected[key] for key in got}


def test_a_bound_for_memory_is_in_the_gauges_and_the_log(caplog):
    model = FailingModel(toy())
    model.most_rows = 4
    with engine_over(model) as (engine, next_event):
        for one in requests(4):
            engine.submit(one)
        while (gauges := until(next_event, Gauges)).memory_bound is None:
            pass
    assert gauges.memory_bound.rows <= 4
    assert gauges.out_of_memory > 0
    log_changes("target", None, gauges)
    log_changes("target", gauges, gauges)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("target: out of memory; forwards have ")
    both = add_gauges([gauges, gauges])
    assert both is not None
    assert both.out_of_memory == 2 * gauges.out_of_memory


def test_a_file_that_rots_while_it_serves_is_told_at_once_and_made_again_at_the_next_load(tmp_path, caplog):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights " * 100_000)
    source, recipe = ModelSource(path, "model", "model.gguf"), CopyRecipe()
    store = ModelStore(tmp_path / "store")
    made = store.prepare(source, recipe, Said())
    watch = ArtefactWatch(store.root, SystemClock(), WatchPace(period_s=0.0, look_s=0.02))
    other = ArtefactWatch(store.root, SystemClock(), WatchPace(period_s=0.0, look_s=0.02))
    other.start(lambda: None)
    with engine_over(toy(), watch) as (_, next_event):
        assert until(next_event, Gauges).corrupt == []
        time.sleep(0.2)
        assert watch.corrupt == other.corrupt == []
        other.stop()
        rot(made / "sub" / "first.bin")
        gauges = until(next_event, Gauges)
        assert gauges.corrupt == [f"{made}: sub/first.bin has other content than was written"]
    log_changes("target", None, gauges)
    assert "sub/first.bin has other content" in caplog.text
    assert store.find(source, recipe) is None
    assert store.prepare(source, recipe, Said()) == made
    assert (made / "sub" / "first.bin").read_bytes() == path.read_bytes()
    assert recipe.runs == 2


def test_reading_again_keeps_to_its_rate_and_leaves_off_when_asked(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(8 << 20))
    store = ModelStore(tmp_path / "store")
    store.prepare(ModelSource(path, "model", "model.gguf"), CopyRecipe(), Said())
    read: list[int] = []

    def wait(count: int) -> bool:
        read.append(count)
        return len(read) == 3

    assert list(store.read_again(time.time() + 1.0, wait)) == []
    assert read[1:] == [1 << 20] * 2
    watch = ArtefactWatch(store.root, SystemClock(), WatchPace(period_s=0.0, bytes_per_s=1.0, look_s=0.0))
    watch.start(lambda: None)
    time.sleep(0.1)
    watch.stop()  # within its first wait of twelve days
    read.clear()
    read += [0, 0, 0]  # and now to the end
    assert list(store.read_again(time.time() + 1.0, wait)) == []
    assert sum(read) > 8 << 20


def test_a_store_that_is_gone_ends_no_watch(tmp_path: Path):
    watch = ArtefactWatch(tmp_path / "nowhere", SystemClock(), WatchPace(look_s=0.01))
    watch.start(lambda: None)
    time.sleep(0.1)
    assert watch._thread is not None
    assert watch._thread.is_alive()
    watch.stop()
