"""Target workers that fail while KV pages move, as the environment variable says: the process is really killed, really
stands still, and the bytes are really changed."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.protocol.commands import KvPages, SharedMemory
from orchestrator.protocol.links.pages import PieceHead, send_piece
from orchestrator.protocol.shared_memory import open_memory
from orchestrator.worker.engine.kv_transfer import departures, page_inbox
from orchestrator.worker.engine.kv_transfer.mover import KvMover
from orchestrator.worker.engine.worker_engine import WorkerEngine
from orchestrator.worker.loading.engine import build_engine

ENTRY = "tests.support.moving:build_failing"
FAULT = "OUTRIDER_TEST_KV"
DIE_WRITING, HANG_WRITING, CORRUPT, DIE_READING = "die writing", "hang writing", "corrupt", "die reading"
DIE_SENDING, CORRUPT_LINK, DIE_RECEIVING = "die sending", "corrupt link", "die receiving"


def build_failing(options: dict[str, Any]) -> WorkerEngine:
    """Return the engine of a target worker with the fault in it."""
    fault = os.environ.get(FAULT, "")
    write, read = KvMover.write, KvMover.read

    def failing_write(self: KvMover, slot: int, tokens: Sequence[int], memory: SharedMemory, lora: str = "") -> KvPages:
        if fault == HANG_WRITING:
            time.sleep(60.0)
        pages = write(self, slot, tokens, memory, lora)
        if fault in (DIE_WRITING, CORRUPT):
            with open_memory(memory, writing=True) as file:
                if fault == CORRUPT:
                    (before,) = os.pread(file, 1, pages.length_bytes // 2)
                    os.pwrite(file, bytes([before ^ 1]), pages.length_bytes // 2)
                else:
                    os.ftruncate(file, pages.length_bytes // 2)
                    os.kill(os.getpid(), signal.SIGKILL)
        return pages

    def failing_read(self: KvMover, pages: KvPages, tokens: Sequence[int], lora: str = "") -> Any:
        if fault == DIE_READING:
            with open_memory(pages.memory):
                os.kill(os.getpid(), signal.SIGKILL)
        return read(self, pages, tokens, lora)

    if fault in (DIE_SENDING, CORRUPT_LINK):
        vars(departures)["send_piece"] = _failing_send(fault)
    if fault == DIE_RECEIVING:
        vars(page_inbox)["receive_into"] = _die_receiving
    KvMover.write, KvMover.read = failing_write, failing_read  # type: ignore[method-assign]
    return build_engine(options)


def _failing_send(fault: str) -> Callable[[socket.socket, PieceHead, Sequence[memoryview]], None]:
    def failing_send(link: socket.socket, head: PieceHead, parts: Sequence[memoryview]) -> None:
        if fault == CORRUPT_LINK and parts:
            first = bytearray(parts[0])
            first[0] ^= 1
            parts = [memoryview(first), *parts[1:]]
        if fault == DIE_SENDING and parts:
            send_piece(link, head, [parts[0][: len(parts[0]) // 2]])
            os.kill(os.getpid(), signal.SIGKILL)
        send_piece(link, head, parts)

    return failing_send


def _die_receiving(link: socket.socket, place: memoryview) -> None:
    link.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)
