"""A daemon with the sockets of systemd: nothing is refused while it is restarted, and reloads are told."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

import httpx
import openai
import pytest

from orchestrator.cli.daemon_socket import query_daemon
from orchestrator.daemon.systemd.activation import take_sockets
from orchestrator.errors import DaemonError
from tests.support.activated import play_systemd
from tests.support.daemon import configuration, outrider_process

TAKE = "from orchestrator.daemon.systemd.activation import take_sockets; print(take_sockets())"


def test_sockets_of_another_process_are_left_alone_and_nobody_inherits_the_names():
    told = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x", "PATH": "/bin"}
    assert take_sockets(told).api is None
    assert told == {"PATH": "/bin"}


@pytest.mark.parametrize("what", ["a file", "no listener", "two of a kind"])
def test_files_that_no_daemon_can_serve_are_told(what):
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
            if what == "two of a kind":
                one.listen()
        first_fd = "0</dev/null; exec 3<&0" if what == "a file" else f"3<&{first.fileno()}"
        script = f'exec {first_fd} 4<&{second.fileno()}; LISTEN_PID=$$ exec "$@"'
        done = subprocess.run(
            ["bash", "-c", script, "bash", sys.executable, "-c", TAKE],
            pass_fds=(first.fileno(), second.fileno()),
            env={**os.environ, "LISTEN_FDS": "2"},
            capture_output=True,
            text=True,
            check=False,
        )
    says = {"a file": "is no socket", "no listener": "does not listen", "two of a kind": "more than one TCP socket"}
    assert DaemonError.__name__ in done.stderr
    assert says[what] in done.stderr


@dataclass
class Load:
    """Clients that each open a connection of their own, and what became of them."""

    url: str
    stop: threading.Event = field(default_factory=threading.Event)
    answered: int = 0
    later: int = 0
    refused: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Ask until told to stop; a 503 says when to come back."""
        while not self.stop.is_set():
            body = {"model": "toy", "prompt": "x", "max_tokens": 8}
            try:
                answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=180.0)
            except httpx.HTTPError as error:
                with self.lock:
                    self.refused.append(f"{type(error).__name__}: {error}")
                continue
            with self.lock:
                if answer.status_code == httpx.codes.OK:
                    self.answered += 1
                elif answer.status_code in (429, 503) and "Retry-After" in answer.headers:
                    self.later += 1
                else:
                    self.refused.append(f"{answer.status_code}: {answer.text}")
            time.sleep(0.01)


def test_a_restart_under_load_refuses_no_connection_and_loses_no_stream(tmp_path):
    config = configuration(tmp_path, script="base_ms=5")
    with play_systemd(tmp_path) as systemd:
        first = systemd.start(config)
        load = Load(systemd.url)
        threads = [threading.Thread(target=load.run) for _ in range(6)]
        for thread in threads:
            thread.start()
        streamed: list[str] = []
        with openai.OpenAI(base_url=f"{systemd.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(model="toy", prompt="a", max_tokens=150, seed=7, stream=True)
            streamed.append(next(iter(stream)).choices[0].text)
            before = load.answered
            first.send_signal(signal.SIGTERM)
            chunks = list(stream)
            streamed += [chunk.choices[0].text for chunk in chunks if chunk.choices]
            finish = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1]
            assert first.wait(120) == 0
            time.sleep(0.5)  # nobody runs: connections wait at the socket
            second = systemd.start(config)
            until = time.monotonic() + 120.0
            while load.answered <= before + 20 and time.monotonic() < until:
                time.sleep(0.05)
            alone = client.completions.create(model="toy", prompt="a", max_tokens=150, seed=7).choices[0].text
        load.stop.set()
        for thread in threads:
            thread.join()
        assert load.refused == []
        assert load.answered > before + 20
        assert finish == "length"
        assert "".join(streamed) == alone
        second.send_signal(signal.SIGTERM)
        assert second.wait(120) == 0
        assert (tmp_path / "admin.sock").exists()  # it is systemd's


def test_connections_wait_even_while_no_daemon_runs(tmp_path):
    with play_systemd(tmp_path) as systemd:
        answers: list[int] = []
        early = threading.Thread(
            target=lambda: answers.append(httpx.get(f"{systemd.url}/health", timeout=180.0).status_code)
        )
        early.start()
        systemd.start(configuration(tmp_path))
        early.join()
        assert answers == [200]
        assert query_daemon(tmp_path / "admin.sock")["api"] == f"{systemd.url}/v1"


def test_a_reload_is_told_with_its_moment_and_a_bad_file_changes_nothing(tmp_path):
    config = configuration(tmp_path)
    config.write_text(config.read_text().replace("api: {", "api: {keys_file: keys, "))
    keys = tmp_path / "keys"
    made = outrider_process("keys", "create", "one", "--config", str(config))
    assert made.returncode == 0, made.stderr
    headers = {"Authorization": f"Bearer {made.stdout.strip()}"}
    with play_systemd(tmp_path) as systemd:
        process = systemd.start(config)
        for text, failed in ((keys.read_text(), False), ("two words\n", True), (keys.read_text(), False)):
            before_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            keys.write_text(text)
            process.send_signal(signal.SIGHUP)
            begun = systemd.wait_for("RELOADING", process)
            assert before_us <= int(begun["MONOTONIC_USEC"]) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            ended = systemd.wait_for("READY", process)
            assert ("reload failed" in ended["STATUS"]) is failed
            assert httpx.get(f"{systemd.url}/v1/models", headers=headers).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert "STOPPING" in systemd.wait_for("STOPPING", process)
        assert int(systemd.wait_for("EXTEND_TIMEOUT_USEC", process)["EXTEND_TIMEOUT_USEC"]) >= 30_000_000
        assert process.wait(120) == 0
