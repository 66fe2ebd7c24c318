"""Clients as their users install them, each in an environment of its own, over a real daemon with the default model.

`make slow` runs them where pip and npm find them. The programs are in `real/`: each prints what its client made of the
answers. At temperature 0 a stream is the whole answer, and the daemon refuses nothing of what they send.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import bare_environment, install, list_refused, make_environment
from tests.support.daemon import Daemon

# An environment takes minutes on two busy cores, and the model's answers as long.
pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(3000)]
REAL = Path(__file__).parent / "real"
SEA = {"salty": bool, "depth_m": int}
CALL = ["get_weather"]


@dataclass(frozen=True)
class Client:
    """`expected`: the type of each value that the program prints, by its name; a dictionary is an object of such
    types, a list begins a call. `same`: pairs of names whose values are equal. `shared`: torch is that
    which is here."""

    packages: tuple[str, ...]
    expected: dict[str, Any]
    same: tuple[tuple[str, str], ...] = ()
    shared: bool = False


PYTHON_CLIENTS = {
    "litellm": Client(
        ("litellm[proxy]==1.106.12",),
        {"chat": str, "chat streamed": str, "object": {"salty": bool}, "call": CALL, "responses": str, "messages": str},
        (("chat", "chat streamed"), ("chat", "responses"), ("chat", "messages")),
    ),
    "pydantic_ai": Client(
        ("pydantic-ai-slim[openai]==2.68.0",),
        {
            f"{kind} {name}": value
            for kind in ("chat", "responses")
            for name, value in {
                "whole": str,
                "streamed": str,
                "NativeOutput": SEA,
                "ToolOutput": SEA,
                "call": [CALL],
            }.items()
        },
        (("chat whole", "chat streamed"), ("chat whole", "responses whole"), ("chat whole", "responses streamed")),
    ),
    "openai_agents": Client(
        ("openai-agents==0.24.0",),
        {
            f"{kind} {name}": value
            for kind in ("chat", "responses")
            for name, value in {
                "whole": str,
                "streamed": str,
                "events": int,
                "output type": SEA,
                "with a tool": str,
                "calls": int,
            }.items()
        },
        (("chat whole", "chat streamed"), ("chat whole", "responses whole"), ("chat whole", "responses streamed")),
    ),
    "instructor": Client(
        ("instructor==1.17.0",),
        {
            **{
                f"{mode} {form}": SEA
                for mode in ("TOOLS", "JSON_SCHEMA", "TOOLS_STRICT")
                for form in ("object", "partial")
            },
            "JSON object": str,
            "RESPONSES_TOOLS object": SEA,
        },
    ),
    "llama_index": Client(
        ("llama-index-llms-openai-like==0.8.1",),
        {
            **dict.fromkeys(("completion", "completion streamed", "chat", "chat streamed"), str),
            "call": [CALL],
            "object": SEA,
        },
        (("completion", "completion streamed"), ("chat", "chat streamed")),
    ),
    "dspy": Client(("dspy==3.4.1",), {"text": str, "signature": SEA, "responses": str, "streamed": list}),
    "guidellm": Client(
        ("guidellm==0.8.1",),
        {
            f"{route} {name}": value
            for route in ("/v1/chat/completions", "/v1/completions")
            for name, value in {"answers": int, "tokens": [16]}.items()
        },
        shared=True,
    ),
    "smolagents": Client(
        ("smolagents[openai]==1.26.0",),
        {"chat": str, "streamed": str, "call": CALL, "agent": str},
        (("chat", "streamed"),),
    ),
}
NODE_CLIENTS = {
    "openai": Client(
        ("openai@7.59.0", "zod@4.6.7"),
        {
            **dict.fromkeys(("chat", "chat streamed", "responses", "responses streamed"), str),
            "chat object": SEA,
            "chat calls": int,
            "responses object": SEA,
        },
        (("chat", "chat streamed"), ("chat", "responses"), ("chat", "responses streamed")),
    )
}
"""By the names of their programs: ask_NAME.py, ask_NAME.mjs."""


def read_results(command: list[str], daemon: Daemon, directory: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run a program over the daemon, and return the values that it prints by name."""
    done = subprocess.run(
        [*command, daemon.url, "seas"], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    lines = [
        json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT ")
    ]
    assert done.returncode == 0, f"{[line['name'] for line in lines]}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return {line["name"]: line["value"] for line in lines}


def check_value(value: Any, expected: Any) -> None:
    """Assert that a value is of an expected form, and not empty."""
    if isinstance(expected, dict):
        assert {key: type(value[key]) for key in expected} == expected
    elif isinstance(expected, list):
        inner = expected[0]
        check_value(value[0], inner) if isinstance(inner, list) else None
        assert isinstance(inner, list) or value[0] == inner
    else:
        assert isinstance(value, expected)
        assert value


def check_client(client: Client, results: dict[str, Any], daemon: Daemon) -> None:
    """Assert that a client read all answers as it should, and that the daemon refused it nothing."""
    assert results.keys() == client.expected.keys()
    for name, expected in client.expected.items():
        check_value(results[name], expected)
    for first, second in client.same:
        assert results[first] == results[second]
    assert not list_refused(daemon)


@pytest.mark.parametrize("name", PYTHON_CLIENTS)
def test_a_python_client_is_served(name: str, seas: Daemon, tmp_path: Path):
    client, environment = PYTHON_CLIENTS[name], bare_environment(tmp_path)
    python = str(make_environment(tmp_path, client.packages, shared=client.shared))
    try:
        results = read_results([python, str(REAL / f"ask_{name}.py")], seas, tmp_path, environment)
    finally:
        shutil.rmtree(tmp_path / "venv")  # pytest keeps directories
    check_client(client, results, seas)


@pytest.mark.parametrize("name", NODE_CLIENTS)
def test_a_client_for_node_is_served(name: str, seas: Daemon, tmp_path: Path):
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    client, environment = NODE_CLIENTS[name], bare_environment(tmp_path)
    install(["npm", "install", "--silent", "--no-save", *client.packages], tmp_path)
    program = str(shutil.copy(REAL / f"ask_{name}.mjs", tmp_path))  # node looks for packages beside the program
    check_client(client, read_results(["node", program], seas, tmp_path, environment), seas)
