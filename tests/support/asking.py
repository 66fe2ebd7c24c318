"""Clients that ask the same again and again, and take note of every answer that is not the expected one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.support.daemon import Daemon

_ENDS_WITHIN_S = 240.0


@contextmanager
def asking(daemon: Daemon, bodies: Sequence[dict[str, Any]], expected: Sequence[str]) -> Iterator[list[str]]:
    """Ask each of these all the time, one client each. Yields what was wrong: another text, or an error."""
    wrong: list[str] = []
    ended = threading.Event()

    def ask(body: dict[str, Any], text: str) -> None:
        while not ended.is_set():
            try:
                told = str(daemon.client.completions.create(**body).choices[0].text)
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
            if told != text:
                wrong.append(told)
                return

    clients = [threading.Thread(target=ask, args=one) for one in zip(bodies, expected, strict=True)]
    for client in clients:
        client.start()
    try:
        yield wrong
    finally:
        ended.set()
        for client in clients:
            client.join(_ENDS_WITHIN_S)
