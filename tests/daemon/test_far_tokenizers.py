"""A worker on a host that shares no files with the daemon's: the daemon translates with a tokenizer of its own.

All but the worker process is real: a target's life and its control, and the files of both stores.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from adapters.contract import AdapterError
from adapters.model_identity import ModelIdentity
from adapters.model_source import resolve
from adapters.model_store import ModelStore
from adapters.own_tokenizer import TokenizerRecipe
from orchestrator.clock import SystemClock
from orchestrator.daemon.bootstrap.plan_board import PlanBoard
from orchestrator.daemon.bootstrap.target_life import DaemonGround, TargetLife
from orchestrator.daemon.bootstrap.tokenizers import TargetTokenizers
from orchestrator.daemon.cluster.shared_cluster import SharedCluster
from orchestrator.daemon.control.state import READY as SERVES
from orchestrator.daemon.sandbox.sandbox import Sandbox
from orchestrator.errors import DaemonError
from orchestrator.protocol.contract import Worker, WorkerSpec
from orchestrator.protocol.ready import Ready
from tests.api.support import READY
from tests.daemon.test_first_start import FakeCluster
from tests.support import tiny_gguf
from tests.support.config import parse_config
from tests.support.ready import change_ready
from tests.support.tiny_gguf import Tiny

WORDS = (*map(chr, range(33, 126)), "xy")
MODEL = Tiny("llama", vocabulary=len(WORDS), words=WORDS)
CONFIG = (
    "model: {source: m.gguf, name: m}\ncluster: {runtime: local}\n"
    "store: {directory: '%(base)s/near'}\nstate: {directory: '%(base)s/state'}\n"
)


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox()
    yield made
    made.close()


@dataclass
class FarCluster(FakeCluster):
    """Starts workers that are ready at once."""

    ready: Ready = READY

    async def start(self, spec: WorkerSpec) -> Worker:
        worker = await super().start(spec)
        self.workers[-1].said.put_nowait(self.ready)
        return worker


def load_far(base: Path) -> Ready:
    """Prepare the model's tokenizer in another host's store, and return what its worker says."""
    store, file = ModelStore(base / "far"), resolve("m.gguf", base)
    store.prepare(file, TokenizerRecipe(), lambda *_: None)
    digest = store.digest(file)
    identity = ModelIdentity("m.gguf", digest, file.name, file.source)
    return change_ready(READY, model_digest=digest, identities=[identity])


async def wait_ready(base: Path, ready: Ready, sandbox: Sandbox) -> tuple[str, str, list[int]]:
    """Let a worker be ready; returns the target's phase before and after the daemon has waited for it, and "xy" by
    its tokenizer."""
    config = parse_config(CONFIG % {"base": base}, base / "cluster.yaml")
    cluster, clock = FarCluster(own_node="10.0.0.1", ready=ready), SystemClock()
    board = PlanBoard([config], base)
    ground = DaemonGround(
        base / "cluster.yaml",
        base / "state",
        SharedCluster(cluster),
        board,
        clock,
        sandbox,
        lambda name, progress: None,
    )
    life = TargetLife(config, ground)
    await life.prepare()
    await life.start()
    try:
        await life.control.wait_settled()
        before = life.control.view()
        assert (before.ready, life.tokenizer) == (ready, None)
        await life.wait_ready()
        assert life.tokenizer is not None
        return before.phase, life.control.view().phase, life.tokenizer.encode("xy", special=False)
    finally:
        await life.end_planning()
        await life.close()


def test_a_target_on_another_host_serves_by_the_daemons_own_tokenizer(tmp_path: Path, sandbox: Sandbox) -> None:
    tiny_gguf.write(tmp_path / "m.gguf", MODEL)
    ready = load_far(tmp_path)
    (tmp_path / "far").rename(tmp_path / "of-another-host")
    before, after, tokens = asyncio.run(wait_ready(tmp_path, ready, sandbox))
    assert (before != SERVES, after, tokens) == (True, SERVES, [WORDS.index("xy")])


def test_a_tokenizer_is_read_as_soon_as_a_worker_has_prepared_it_and_stands_for_no_other_model(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    tiny_gguf.write(tmp_path / "m.gguf", MODEL)
    tokenizers = TargetTokenizers(tmp_path, tmp_path / "far", sandbox, lambda progress: None)
    assert not tokenizers.load_known("m.gguf")
    ready = load_far(tmp_path)
    assert tokenizers.load_known("m.gguf")
    found = tokenizers.find_loaded(ready)
    assert found is not None
    assert found.encode("xy", special=False) == [WORDS.index("xy")]
    tiny_gguf.write(tmp_path / "m.gguf", Tiny("llama", vocabulary=len(WORDS), words=WORDS[::-1]))
    assert not tokenizers.load_known("m.gguf"), "nobody has read what is there now"
    other = load_far(tmp_path)
    assert tokenizers.find_loaded(other) is None
    assert tokenizers.load_known("m.gguf")
    for one, words in ((ready, WORDS), (other, WORDS[::-1])):
        found = tokenizers.find_loaded(one)
        assert found is not None
        assert found.encode("xy", special=False) == [words.index("xy")]
    (tmp_path / "m.gguf").unlink()
    assert tokenizers.load_known("m.gguf"), "whoever waits for it says why"


@pytest.mark.parametrize("here", ["nothing", "another model"])
def test_a_daemon_without_the_workers_files_says_where_to_put_them(tmp_path: Path, sandbox: Sandbox, here: str) -> None:
    tiny_gguf.write(tmp_path / "m.gguf", MODEL)
    ready = load_far(tmp_path)
    (tmp_path / "m.gguf").unlink()
    if here == "another model":
        tiny_gguf.write(tmp_path / "m.gguf", Tiny("llama", vocabulary=len(WORDS), words=WORDS[::-1]))
    with pytest.raises(DaemonError) as refusal:
        asyncio.run(wait_ready(tmp_path, ready, sandbox))
    told = str(refusal.value)
    why = "there is no m.gguf in" if here == "nothing" else "another one at its place"
    for part in ("m.gguf: ", "10.0.0.1", "process of target", ready.model.digest, why, "at the same place"):
        assert part in told


def test_a_daemon_that_stops_reads_no_large_model_to_its_end(tmp_path: Path, monkeypatch, sandbox: Sandbox) -> None:
    stopped, ends = threading.Event(), []

    def read_on(store, source, base, identity, progress) -> Path:
        progress("reading m.gguf", 0.1)
        assert stopped.wait(60)
        try:
            progress("reading m.gguf", 0.2)
        except AdapterError as error:
            ends.append(str(error))
        return base

    async def stop() -> None:
        begun = asyncio.Event()
        tokenizers = TargetTokenizers(tmp_path, tmp_path, sandbox, lambda progress: begun.set())
        loading = asyncio.create_task(tokenizers.load("m.gguf", None))
        await begun.wait()
        loading.cancel()
        await asyncio.wait([loading])
        stopped.set()

    monkeypatch.setattr("orchestrator.daemon.bootstrap.tokenizers.prepare_own_tokenizer", read_on)
    asyncio.run(stop())
    assert ends == ["m.gguf: nobody waits for its tokenizer any more"]
