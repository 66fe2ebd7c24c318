"""A process held by a file descriptor: it is waited for and signalled without its number, which another may get.

Child processes and others are alike here, but for one thing: how a process ended is told to its parent alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from contextlib import suppress

from orchestrator.launch.homes import is_alive


class ProcessHandle:
    """One process, from the event loop that made the handle. `code` is its exit code, or minus the signal's number;
    None before its end, and where it is not our child."""

    def __init__(self, pid: int, descriptor: int, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self.code: int | None = None
        self._descriptor = descriptor
        self._child = child
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, self._observe_end)

    @classmethod
    def of_child(cls, child: subprocess.Popen[bytes]) -> ProcessHandle:
        """Hold a child process, and reap it at its end. Nobody else may wait for it. Raises OSError."""
        return cls(child.pid, os.pidfd_open(child.pid), child)

    @classmethod
    def find(cls, pid: int, birth: str) -> ProcessHandle | None:
        """Hold the process with this number if it is the one that was born then (see `homes.read_birth`); None where
        that one has ended."""
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return None
        # The number stands for this process as long as the descriptor does, so what is read now is its own.
        if not is_alive(pid, birth):
            os.close(descriptor)
            return None
        return cls(pid, descriptor)

    @property
    def ended(self) -> bool:
        """True when the process has ended."""
        return self._ended.is_set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the process; False where it did not end in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        return self._ended.is_set()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when the process has ended."""
        if not self._ended.is_set():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    async def end(self, grace_s: float, term_s: float, kill_s: float) -> bool:
        """Wait so long for the process to end by itself, then after SIGTERM, then after SIGKILL. Returns whether it
        has ended: one in an uninterruptible wait does not."""
        if await self.wait(grace_s):
            return True
        self.send_signal(signal.SIGTERM)
        if await self.wait(term_s):
            return True
        self.send_signal(signal.SIGKILL)
        return await self.wait(kill_s)

    def release(self) -> None:
        """Let go of a process that is still running. Idempotent."""
        if not self._ended.is_set():
            self._close()

    def _observe_end(self) -> None:
        if self._child is not None:
            with suppress(ChildProcessError):
                status = os.waitid(os.P_PIDFD, self._descriptor, os.WEXITED | os.WNOHANG)
                if status is None:  # readable a moment before it can be reaped
                    return
                self.code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
            self._child.returncode = 0 if self.code is None else self.code  # or it is taken for running
        self._close()
        self._ended.set()

    def _close(self) -> None:
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


def describe_end(code: int | None) -> str:
    """Return how a process ended, as in "exited with code 1"."""
    if code is None:
        return "ended"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
