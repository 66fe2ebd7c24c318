"""How many modules there are to read for one round of the decode loop, and for one chat on the daemon. Adapters,
drafters and KV moves come to the loop from outside, behind their contracts."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx

from tests.support.daemon import configuration
from tests.support.reach import PACKAGES, watching

ENTRY = "orchestrator.worker.engine.loop"
ROUND_BAR = 70
CHAT_BAR = 50
CHATS = 3
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "stream": True}
SETTLED_S, IDLE_S = 0.5, 2.0


def list_reached(entry: str) -> list[str]:
    """Return the modules of ours that importing one of them brings in, packages aside."""
    listing = "import sys; print(*(name for name, module in sys.modules.items() if not hasattr(module, '__path__')))"
    code = f"import {entry}; {listing}"
    names = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    return sorted(name for name in names if name.startswith(PACKAGES))


def test_a_round_reaches_few_modules() -> None:
    modules = list_reached(ENTRY)
    print(f"{len(modules)} modules are reached by one round; the bar is {ROUND_BAR}", *modules, sep="\n")  # noqa: T201
    assert len(modules) <= ROUND_BAR


def ask(url: str) -> None:
    answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=60.0)
    assert answer.text.endswith("data: [DONE]\n\n")


def test_a_chat_runs_few_modules(tmp_path: Path) -> None:
    """Counted are modules that run in most of some chats, and never while the daemon has nothing to do: what a timer
    runs now and then is in neither."""
    runs: Counter[str] = Counter()
    idle: set[str] = set()
    with watching(configuration(tmp_path)) as (daemon, take):
        ask(daemon.url)
        time.sleep(SETTLED_S)
        for _ in range(CHATS):
            take()
            ask(daemon.url)
            time.sleep(SETTLED_S)
            runs.update(take())
            time.sleep(IDLE_S)
            idle |= take()
    chats = {name for name, count in runs.items() if count > CHATS / 2}
    modules = sorted(chats - idle)
    with_idle = f"{len(chats)} with those of idle time"
    print(f"{len(modules)} modules run for one chat, {with_idle}; the bar is {CHAT_BAR}", *modules, sep="\n")  # noqa: T201
    assert len(modules) <= CHAT_BAR
