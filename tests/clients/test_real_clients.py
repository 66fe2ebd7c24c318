"""Clients as their users install them, each in an environment of its own, over a real daemon with the default model.

`make slow` runs them where pip and npm find them. The programs are in `real/`: each prints what its client made of the
answers. At temperature 0 a stream is the whole answer, and the daemon refuses nothing of what they send.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon, running

# An environment takes minutes on two busy cores, and the model's answers as long.
pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(3000)]
REAL = Path(__file__).parent / "real"
SEA = {"salty": bool, "depth_m": int}
CALL = ["get_weather"]


@dataclass(frozen=True)
class Client:
    """`expected`: the type of each value that the program prints, by its name; a dictionary is an object of such
    types, a list begins a call. `same`: pairs of names whose values are equal."""

    packages: tuple[str, ...]
    expected: dict[str, Any]
    same: tuple[tuple[str, str], ...] = ()


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


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("clients")
    config = directory / "cluster.yaml"
    config.write_text(
        f"model: {{source: '{default_model_path}', name: seas}}\n"
        f"api: {{port: 0, admin_socket: '{directory}/admin.sock'}}\n"
        f"store: {{directory: '{directory}/store'}}\n"
        f"state: {{directory: '{directory}/state'}}\n"
        "journal: {reserve: 1 MiB}\n"
        "logging: {format: json}\n"
    )
    with running(config) as started:
        yield started


def install(command: list[str], directory: Path, environment: dict[str, str]) -> None:
    """Run an installer to its end; the test is skipped where it finds nothing."""
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(command)}: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}")


def bare_environment(directory: Path) -> dict[str, str]:
    """What a client sees of this machine: no key, no proxy, no files of the user's."""
    kept = {
        key: os.environ[key] for key in ("PATH", "LANG", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS") if key in os.environ
    }
    return {**kept, "HOME": str(directory), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}


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
    refused = [line for line in daemon.log.read_text(encoding="utf-8").splitlines() if '"request refused"' in line]
    assert not refused


@pytest.mark.parametrize("name", PYTHON_CLIENTS)
def test_a_python_client_is_served(name: str, daemon: Daemon, tmp_path: Path):
    client, environment = PYTHON_CLIENTS[name], bare_environment(tmp_path)
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    install([python, "-m", "pip", "install", "-q", *client.packages], tmp_path, {**os.environ})
    try:
        results = read_results([python, str(REAL / f"ask_{name}.py")], daemon, tmp_path, environment)
    finally:
        shutil.rmtree(tmp_path / "venv")  # pytest keeps directories
    check_client(client, results, daemon)


@pytest.mark.parametrize("name", NODE_CLIENTS)
def test_a_client_for_node_is_served(name: str, daemon: Daemon, tmp_path: Path):
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    client, environment = NODE_CLIENTS[name], bare_environment(tmp_path)
    install(["npm", "install", "--silent", "--no-save", *client.packages], tmp_path, {**os.environ})
    program = shutil.copy(REAL / f"ask_{name}.mjs", tmp_path)  # node looks for packages beside the program
    check_client(client, read_results(["node", program], daemon, tmp_path, environment), daemon)
