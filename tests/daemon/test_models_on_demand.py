"""Models that come and go in a real daemon: three of them, and memory for two."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.cut_streams import BODY, Client, kill_in_mid_stream
from tests.support.daemon import Daemon, configuration, outrider_process, running, starting
from tests.support.waiting import until

NAMES = ("toy", "second", "third")
ASK: dict[str, Any] = {"prompt": "the sea is", "max_tokens": 12, "temperature": 0.8, "seed": 3}
LONG = BODY | {"max_tokens": 150}


def write_three(
    directory: Path, *, script: str = "base_ms=2", keep: str = "on_demand", idle_s: float = 600.0, memory: str = "2.5 GiB"
) -> Path:
    """A file with three models of a GiB each, and memory for two."""
    terms = f"keep: {keep}, idle_s: {idle_s}"
    models = "models:\n" + "".join(
        f"  - {{source: 'simulated:toy?shift={3 + number}&{script}', adapter: simulated, name: {name}, drafts: [], "
        f"{terms}}}\n"
        for number, name in enumerate(NAMES[1:])
    )
    path = configuration(directory, script=script, extra=f"drafts: []\n{models}limits: {{models_memory: {memory}}}\n")
    path.write_text(path.read_text().replace("name: toy, replicas: 1", f"name: toy, {terms}"))
    return path


def residency(daemon: Daemon) -> dict[str, dict[str, Any]]:
    found = daemon.status()
    return {each["model"]: each["residency"] for each in (found, *found["models"])}


def states(daemon: Daemon) -> dict[str, str]:
    return {name: each["state"] for name, each in residency(daemon).items()}


def text_of(daemon: Daemon, name: str, **more: Any) -> str:
    answer = daemon.client.completions.create(**(ASK | more), model=name, extra_body={"ignore_eos": True})
    return str(answer.choices[0].text)


def test_a_model_is_loaded_by_its_first_request_and_unloaded_when_it_rests(tmp_path):
    with running(write_three(tmp_path, idle_s=1.0)) as daemon:
        assert set(states(daemon).values()) == {"not loaded"}
        entries = {each.id: each.model_dump() for each in daemon.client.models.list()}
        assert entries["second"]["state"] == "not loaded"
        first = text_of(daemon, "second")
        until(lambda: states(daemon)["second"] == "not loaded", 30)
        assert residency(daemon)["second"]["unloads"] == {"idle": 1}
        assert text_of(daemon, "second") == first, "it comes back as it was"
        assert states(daemon)["toy"] == "not loaded"
        assert daemon.stop() == 0


if __name__ == "__main__":
    pytest.main([__file__])
