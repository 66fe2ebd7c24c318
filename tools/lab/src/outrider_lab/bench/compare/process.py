"""An engine in a process of its own: messages over a pipe, one call at a time, stopped whenever it is not its turn.

Down go (method, arguments); up come any number of ("doing", what), and then one of ("ok", value),
("not offered", why), ("missing", why) and ("failed", why).
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from adapters.parent_process import end_with_parent
from outrider_lab.peers.contract import EngineMissing, NotOffered, PeerEngine, listen

_CALL_TIMEOUT_S = 900.0
_END_TIMEOUT_S = 10.0
_LOG_TAIL = 300


class EngineFailed(Exception):
    """An engine raised, died or did not answer; the message says which."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One row of a comparison. `entry`: "module:function", which is called with `options`. `serves`: whether the engine
    is a server, so that the process is its client and its memory is that of what the process has started."""

    engine: str
    mode: str
    entry: str
    options: Any
    serves: bool = False

    @property
    def name(self) -> str:
        return f"{self.engine} {self.mode}"


class EngineProcess:
    """A loaded engine. It runs within `turn` only: at other times its process is stopped, so that no thread of it
    that waits for work takes a core from another engine. A server that it started is stopped with it."""

    def __init__(self, spec: EngineSpec, logs: Path, hear: Callable[[str], None] = lambda _what: None) -> None:
        """Start the process and load the engine; `hear` is told what takes long meanwhile.

        Raises EngineMissing, EngineFailed."""
        self.spec, self._hear = spec, hear
        self._log = logs / f"{spec.name.replace(' ', '-').replace('/', '-')}.log"
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._started: list[int] = []
        self._process = context.Process(target=serve_engine, args=(theirs, spec, str(self._log)), daemon=False)
        started_s = time.perf_counter()
        self._process.start()
        theirs.close()
        try:
            self.described: dict[str, str] = self.call("describe")
        except BaseException:
            self.close()
            raise
        self.load_s = time.perf_counter() - started_s
        self._started = [one.pid for one in psutil.Process(self._process.pid).children(recursive=True)]
        self._signal(signal.SIGSTOP)

    @contextmanager
    def turn(self) -> Iterator[EngineProcess]:
        """Let the engine run."""
        self._signal(signal.SIGCONT)
        try:
            yield self
        finally:
            self._signal(signal.SIGSTOP)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine. Raises NotOffered, EngineMissing, EngineFailed."""
        try:
            self._pipe.send((method, arguments))
            kind, value = self._receive()
            while kind == "doing":
                self._hear(value)
                kind, value = self._receive()
        except (EOFError, OSError) as error:
            self._process.join(_END_TIMEOUT_S)
            raise EngineFailed(f"its process ended ({_name_exit(self._process.exitcode)}){self._tail()}") from error
        if kind == "ok":
            return value
        raise {"not offered": NotOffered, "missing": EngineMissing}.get(kind, EngineFailed)(value)

    def _receive(self) -> tuple[str, Any]:
        if not self._pipe.poll(_CALL_TIMEOUT_S):
            raise EngineFailed(f"no answer within {_CALL_TIMEOUT_S:.0f} s")
        found: tuple[str, Any] = self._pipe.recv()
        return found

    def peak_bytes(self) -> int | None:
        """Return the most memory that the process and its own have held at a time (VmHWM); None where it is gone, or
        the engine is a server that it did not start."""
        try:
            own = psutil.Process(self._process.pid)
            members = [*([] if self.spec.serves else [own]), *own.children(recursive=True)]
            return sum(_read_peak(one.pid) for one in members) or None
        except (psutil.Error, OSError):
            return None

    def close(self) -> None:
        """End the process, gently where it answers."""
        self._signal(signal.SIGCONT)
        with suppress(OSError, ValueError):
            self._pipe.send(None)
        self._process.join(_END_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def _signal(self, number: int) -> None:
        if self._process.pid is not None and self._process.is_alive():
            with suppress(ProcessLookupError):
                for pid in (self._process.pid, *self._started):
                    os.kill(pid, number)

    def _tail(self) -> str:
        with suppress(OSError):
            said = self._log.read_text(encoding="utf-8", errors="replace").strip()
            return f": ...{said[-_LOG_TAIL:]}" if said else ""
        return ""


def serve_engine(pipe: Connection, spec: EngineSpec, log: str) -> None:
    """Load an engine and answer calls until the other side is done. Runs in the engine's process; what libraries print
    goes into the file `log`."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all: the command ends its engines itself
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    engine: PeerEngine | None = None
    listen(lambda what: pipe.send(("doing", what)))
    with suppress(EOFError, OSError):
        while (asked := pipe.recv()) is not None:
            method, arguments = asked
            try:
                if engine is None:
                    module, _, function = spec.entry.partition(":")
                    engine = getattr(importlib.import_module(module), function)(spec.options)
                pipe.send(("ok", getattr(engine, method)(*arguments)))
            except NotOffered as error:
                pipe.send(("not offered", str(error)))
            except EngineMissing as error:
                pipe.send(("missing", str(error)))
            except Exception as error:  # an engine's own errors are of any kind
                pipe.send(("failed", f"{type(error).__name__}: {error}"[:500]))
    if engine is not None:
        engine.close()


def _read_peak(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _name_exit(code: int | None) -> str:
    if code is None:
        return "no exit code"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
