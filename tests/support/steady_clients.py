"""Clients that ask one after another as programs do, with the retries that `openai` has by default."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from openai import DEFAULT_MAX_RETRIES, OpenAI, OpenAIError

_DONE_WITHIN_S = 240.0
Ask = Mapping[str, Any]


@dataclass
class SteadyClients:
    """What they were told. `wrong`: texts beside those that were expected; `errors`: what they were left with."""

    expected: Sequence[str]
    answers: int = 0
    errors: list[str] = field(default_factory=list)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    _streaming: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, number: int, text: str) -> None:
        with self._lock:
            self.answers += 1
            if text != self.expected[number]:
                self.wrong.append((text, self.expected[number]))

    def wait_reading(self, streams: int) -> None:
        """Wait until so many read a stream, each behind its first token."""
        deadline = time.monotonic() + _DONE_WITHIN_S
        while len(self._streaming) < streams:
            assert time.monotonic() < deadline, f"{len(self._streaming)} streams, {self.errors}"
            time.sleep(0.01)

    def wait_answers(self, more: int) -> None:
        """Wait until so many more were answered."""
        until, deadline = self.answers + more, time.monotonic() + _DONE_WITHIN_S
        while self.answers < until:
            assert time.monotonic() < deadline, f"{until - self.answers} are missing, {self.errors}"
            time.sleep(0.05)

    def check(self) -> None:
        """None was left with an error, and none was told anything else."""
        assert (self.errors, self.wrong) == ([], []), f"{self.errors[:4]}, {self.wrong[:4]}"

    def read(self, client: OpenAI, number: int, ask: Ask, *, streams: bool) -> None:
        if not streams:
            self.note(number, client.completions.create(**ask).choices[0].text)
            return
        pieces: list[str] = []
        try:
            for chunk in client.completions.create(**ask, stream=True):
                pieces += [choice.text for choice in chunk.choices]
                if pieces:
                    self._streaming.add(number)
        finally:
            self._streaming.discard(number)
        self.note(number, "".join(pieces))


@contextmanager
def keep_asking(client: OpenAI, asks: Sequence[Ask], expected: Sequence[str]) -> Iterator[SteadyClients]:
    """Let a client for each ask read its streams, one after another, and one more ask all of them without; see in the
    end that nobody was left with an error or told anything else."""
    clients, ended = SteadyClients(expected), threading.Event()
    client = client.with_options(max_retries=DEFAULT_MAX_RETRIES)

    def ask_on(numbers: Sequence[int], *, streams: bool) -> None:
        while not ended.is_set():
            for number in numbers:
                try:
                    clients.read(client, number, asks[number], streams=streams)
                except OpenAIError as error:
                    clients.errors.append(f"{type(error).__name__}: {error}")

    every = range(len(asks))
    threads = [threading.Thread(target=ask_on, args=([number],), kwargs={"streams": True}) for number in every]
    threads.append(threading.Thread(target=ask_on, args=(every,), kwargs={"streams": False}))
    for thread in threads:
        thread.start()
    try:
        yield clients
    finally:
        ended.set()
        for thread in threads:
            thread.join(_DONE_WITHIN_S)
    assert not any(thread.is_alive() for thread in threads)
    clients.check()
