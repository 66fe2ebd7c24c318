"""The Ray actor that hosts an engine, in a process that Ray starts on any node of its cluster.

A remote node needs the same outrider installed as the daemon; nothing is shipped to it. Events travel back as a
streaming generator, commands as actor calls without a reply.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

from orchestrator.launch.process_end import read_start_time_s
from orchestrator.machine.core_dumps import limit_core_dumps
from orchestrator.protocol.contract import NODE_ADDRESS
from orchestrator.worker.host import EngineHost, die_before_the_daemon, end_process_with_its_threads

CONCURRENCY_GROUPS = {"events": 1, "commands": 1, "ending": 1}
"""A thread each: commands are carried out in their order, and the end of it all waits for none."""


class HostActor:
    """The actor: an engine host whose engine runs in a thread of its own."""

    def __init__(self, entry: str, options: dict[str, Any], cores: list[int]) -> None:
        import ray

        limit_core_dumps()  # its Ray may be older than the daemon
        os.environ[NODE_ADDRESS] = ray.util.get_node_ip_address()
        end_process_with_its_threads()
        die_before_the_daemon()
        self._host = EngineHost(entry, options, cores)
        self._code = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._code = self._host.run()

    def place(self) -> tuple[str, str, int, float]:
        """Return the node's address and id, the process's, and when it began."""
        import ray

        pid = os.getpid()
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), pid, read_start_time_s(pid)

    def submit(self, frame: bytes) -> None:
        try:
            self._host.deliver(frame)
        except Exception as error:  # Ray would keep it to itself
            threading.excepthook(threading.ExceptHookArgs((type(error), error, None, threading.current_thread())))

    def events(self) -> Iterator[bytes]:
        """Yield frames of events until the engine has ended."""
        yield from self._host.frames()

    def exit_code(self) -> int:
        """Wait for the engine's end and return how it ended, as a process would."""
        self._thread.join()
        return self._code

    def end(self) -> None:
        """End this process at once. Such a call needs no head, as `ray.kill` does."""
        os._exit(1)


def read_own_gpus() -> list[int]:
    """Return the GPUs that this task has, as Ray numbers those that its node shows: a node that was started with
    CUDA_VISIBLE_DEVICES counts from 0, too, and so do runtimes there."""
    from ray._private.worker import global_worker

    assigned = global_worker.core_worker.resource_ids()
    return sorted({index for kind, ids in assigned.items() if kind.startswith("GPU") for index, _ in ids})
