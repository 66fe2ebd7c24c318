"""Weights are read while a model is being prepared, and never stand for another file than was read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from adapters.contract import LoadOptions, ModelRefused, silent
from adapters.invariance import fingerprint_bits
from adapters.llama_cpp.adapter import LlamaCppAdapter
from adapters.llama_cpp.native import NativeLibrary
from orchestrator.config.load import load_config
from orchestrator.fitting.worker_options import engine_options
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.worker.loading.models import load_target
from tests.daemon.test_replaced_models import truncate, write_in_place, write_over
from tests.support.tiny_gguf import Tiny, write

WORDS = (*map(chr, range(33, 126)), "xy")
TINY = partial(Tiny, "llama", hidden=128, heads=2, kv_heads=1, head_dim=64, vocabulary=len(WORDS), words=WORDS)
OTHER = TINY(seed=40)
OPTIONS = LoadOptions(slots=4, kv_cache_bytes=8 << 20, threads=1)


class Loads:
    """Which files the library was asked for, and by which threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[threading.Thread] = []
        self.open = 0
        load = NativeLibrary.load_model

        def load_model(library: NativeLibrary, *given: Any, repack: bool) -> int:
            self.threads.append(threading.current_thread())
            model = load(library, *given, repack=repack)
            self.open += model != 0
            return model

        monkeypatch.setattr(NativeLibrary, "load_model", load_model)
        kind = type(LlamaCppAdapter()._find_library())
        close = kind.close_model

        def close_model(library: NativeLibrary, model: int) -> None:
            self.open -= 1
            close(library, model)

        monkeypatch.setattr(kind, "close_model", close_model)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    return Loads(monkeypatch)


def configure(tmp_path: Path) -> EngineOptions:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        f"model: {{source: '{tmp_path}/tiny.gguf', adapter: llama_cpp}}\nlimits: {{kv_cache: 16 MiB}}\n"
        f"store: {{directory: '{tmp_path}/store'}}\ndevices: {{threads: 1}}\n"
    )
    return engine_options(load_config(path), tmp_path)


def read_bits(source: Path, *, ahead: bool, replace: Callable[[Path], None] = lambda _: None) -> str:
    """Prepare, read ahead, replace the file and load it; return the bits of what was loaded."""
    adapter = LlamaCppAdapter()
    prepared = source.parent / f"prepared {ahead}"
    prepared.mkdir()
    adapter.prepare(source, prepared, silent)
    if ahead:
        adapter.read_ahead(source, "CPU")
    replace(source)
    try:
        model = adapter.load(prepared, OPTIONS, silent)
    finally:
        adapter.drop_ahead()
    try:
        return fingerprint_bits(model)
    finally:
        model.close()


def test_a_target_is_read_once_and_beside_what_prepares_it(tmp_path, loads) -> None:
    write(tmp_path / "tiny.gguf", TINY())
    target = load_target(configure(tmp_path), silent)
    assert len(loads.threads) == 1
    assert loads.threads[0] is not threading.main_thread()
    target.model.close()
    assert loads.open == 0


def test_what_was_read_ahead_has_the_files_bits(tmp_path, loads) -> None:
    write(tmp_path / "tiny.gguf", TINY())
    assert read_bits(tmp_path / "tiny.gguf", ahead=True) == read_bits(tmp_path / "tiny.gguf", ahead=False)
    assert len(loads.threads) == 2
    assert loads.open == 0


@pytest.mark.parametrize("replace", [partial(write, tiny=OTHER) for write in (write_over, write_in_place)])
def test_a_file_that_was_replaced_meanwhile_is_not_served_as_what_was_read(tmp_path, loads, replace) -> None:
    source, other = tmp_path / "tiny.gguf", tmp_path / "other"
    write(source, TINY())
    other.mkdir()
    write(other / "tiny.gguf", OTHER)
    assert read_bits(source, ahead=True, replace=replace) == read_bits(other / "tiny.gguf", ahead=False)
    assert loads.open == 0


@pytest.mark.parametrize("replace", [truncate, Path.unlink])
def test_a_file_that_is_no_more_is_not_served(tmp_path, loads, replace) -> None:
    write(tmp_path / "tiny.gguf", TINY())
    with pytest.raises(ModelRefused):
        read_bits(tmp_path / "tiny.gguf", ahead=True, replace=replace)
    assert loads.open == 0


def test_what_no_load_took_is_given_back(tmp_path, loads) -> None:
    write(tmp_path / "tiny.gguf", TINY())
    adapter = LlamaCppAdapter()
    adapter.read_ahead(tmp_path / "tiny.gguf", "CPU")
    adapter.read_ahead(tmp_path / "tiny.gguf", "CPU")
    adapter.drop_ahead()
    adapter.drop_ahead()
    assert loads.open == 0
    adapter.read_ahead(tmp_path / "nothing.gguf", "CPU")
    assert adapter.ahead_bytes == 0
