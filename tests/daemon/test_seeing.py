"""Seeing the fleet from a terminal: status, top, logs, the support bundle and completion, against a real daemon."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import shlex
import socket
import stat
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from orchestrator.cli.daemon_socket import StatusError
from orchestrator.cli.top import look_at_fleet
from orchestrator.cli.top_app import FleetTable, TopApp
from tests.support.archives import read_archive
from tests.support.daemon import Daemon, outrider_process
from tests.support.waiting import until

WITHIN_S = 240.0
ENTRY = [sys.executable, "-m", "orchestrator.cli.entry"]
ASK: dict[str, Any] = {"model": "toy", "prompt": "the sea is", "max_tokens": 8, "ignore_eos": True}


def at(daemon: Daemon) -> tuple[str, str]:
    return "--socket", str(daemon.admin)


def run_entry(*arguments: str, **given: Any) -> subprocess.CompletedProcess[str]:
    """Run the command as its program does."""
    return subprocess.run([*ENTRY, *arguments], capture_output=True, text=True, timeout=280, check=False, **given)


def send(daemon: Daemon, request_id: str) -> str:
    """Ask for a completion; returns the answer's id."""
    sent = httpx.post(f"{daemon.url}/v1/completions", json=ASK, headers={"X-Request-Id": request_id}, timeout=180.0)
    return str(sent.raise_for_status().json()["id"])


def test_status_is_the_same_from_its_short_way_and_from_the_full_command_line(plain):
    short = run_entry("status", "--json", *at(plain))
    full = outrider_process("status", "--json", *at(plain))
    assert (short.returncode, full.returncode) == (0, 0)
    assert json.loads(short.stdout).keys() == json.loads(full.stdout).keys()
    for shown in (run_entry("status", *at(plain)).stdout, outrider_process("status", *at(plain)).stdout):
        assert "toy" in shown
        assert plain.url in shown


def test_status_finds_the_socket_in_a_file_and_says_why_it_cannot(plain, tmp_path):
    config = plain.admin.parent / "cluster.yaml"
    assert json.loads(run_entry("status", "--json", "--config", str(config)).stdout)["phase"] == "ready"
    wrong = tmp_path / "cluster.yaml"
    wrong.write_text("api: {port: many}\n")
    done = run_entry("status", "--config", str(wrong))
    assert done.returncode == 1
    assert f"outrider: {wrong}:1: api.port" in done.stderr
    nobody = run_entry("status", "--socket", str(tmp_path / "none.sock"))
    assert nobody.returncode == 1
    assert "no daemon answers" in nobody.stderr
    assert "Traceback" not in nobody.stderr
    assert run_entry("status", "--nonsense").returncode == 2


def test_status_imports_nothing_that_takes_long(plain):
    heavy = ("pydantic", "fastapi", "numpy", "ray", "typer", "httpx", "asyncio", "orchestrator.config.model")
    code = (
        "import sys; from orchestrator.cli.entry import main; "
        f"sys.argv = ['outrider', 'status', *{list(at(plain))!r}]; main(); "
        f"print('heavy:', [name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"
    assert "toy" in done.stdout


def test_watching_the_status_prints_a_line_of_json_each_time(plain):
    command = [*ENTRY, "status", "--watch", "--interval", "0.2", "--json", *at(plain)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = [json.loads(process.stdout.readline()) for _ in range(3)]
        finally:
            process.terminate()
    assert [one["phase"] for one in lines] == ["ready"] * 3
    assert lines[0]["uptime_s"] < lines[1]["uptime_s"] < lines[2]["uptime_s"]


def test_logs_are_of_the_request_the_level_and_the_worker_that_are_asked_for(plain):
    answer = send(plain, "seen-by-id")
    send(plain, "another-one")

    def read(*arguments: str) -> list[dict[str, Any]]:
        done = outrider_process("logs", "--json", *arguments, *at(plain))
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    until(lambda: len(read("--request", "seen-by-id")) == 2, what="the request ended")
    assert {entry["event"] for entry in read("--request", "seen-by-id")} == {"request accepted", "request ended"}
    assert {entry["request_id"] for entry in read("--request", answer)} == {"seen-by-id"}
    assert all(entry["level"] != "info" for entry in read("--level", "warning", "-n", "10000"))
    about = read("--worker", "target")
    assert any("worker target ready" in entry["event"] for entry in about)
    assert all("request_id" not in entry for entry in about)
    assert read("--since", "2999-01-01") == []
    assert len(read("-n", "1")) == 1
    assert "seen-by-id" in run_entry("logs", *at(plain)).stdout
    wrong = run_entry("logs", "--since", "yesterday", *at(plain))
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr


def test_logs_follow(plain):
    command = [*ENTRY, "logs", "--follow", "--json", "-n", "1", *at(plain)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        found: list[str] = []
        assert process.stdout is not None
        reader = threading.Thread(target=found.extend, args=(iter(process.stdout.readline, ""),))
        reader.start()
        try:
            until(lambda: found, what="the first line")
            send(plain, "followed")
            until(lambda: sum("followed" in line for line in found) == 2, what="both lines of the request")
        finally:
            process.terminate()
            reader.join(WITHIN_S)
    numbers = [line for line in found if "followed" in line]
    assert len(set(numbers)) == 2  # each once


def test_the_support_bundle_says_what_is_in_it_and_hides_hosts(plain, tmp_path):
    made = tmp_path / "made.tar.gz"
    arguments = ("support-bundle", "--hide-hosts", "-o", str(made), *at(plain))
    done = run_entry(*arguments, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    files = read_archive(made)
    assert set(files) == {one["name"] for one in told["contents"]} | {"manifest.json"}
    assert {one["name"]: one["size_bytes"] for one in told["contents"]} == {
        name: len(text) for name, text in files.items() if name != "manifest.json"
    }
    assert json.loads(files["status.json"])["model"] == "toy"
    assert json.loads(files["config.json"])["model"]["source"].startswith("simulated:")
    assert b"outrider_" in files["metrics.txt"]
    assert any("prompts" in line for line in told["left_out"])
    name = socket.gethostname().encode()
    assert not any(name in text for text in files.values())
    again = run_entry(*arguments, cwd=tmp_path)
    assert again.returncode == 1
    assert "is there already" in again.stderr


def test_the_support_bundle_is_made_without_a_daemon(tmp_path):
    done = run_entry("support-bundle", "--socket", str(tmp_path / "none.sock"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no daemon answers" in done.stdout
    (made,) = tmp_path.glob("outrider-support-*.tar.gz")
    assert {"doctor.json", "versions.json"} <= set(read_archive(made))


def complete_in_bash(line: str, folder: Path) -> list[str]:
    """Return what bash offers for a line, by the script that `outrider completion bash` prints."""
    program = folder / "outrider"
    if not program.exists():
        program.write_text(f'#!/bin/sh\nexec {shlex.join(ENTRY)} "$@"\n')
        program.chmod(0o700)
    words = shlex.split(line) + [""] * line.endswith(" ")
    script = (
        f'eval "$(outrider completion bash)"; COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; '
        '_outrider_completion outrider; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    path = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, check=True, env=os.environ | {"PATH": path}
    )
    return done.stdout.split()


def offers(line: str, folder: Path, names: list[str]) -> bool:
    return complete_in_bash(line, folder) == names


def test_bash_completes_commands_options_and_what_runs(plain, tmp_path):
    assert {"status", "support-bundle"} <= set(complete_in_bash("outrider s", tmp_path))
    assert complete_in_bash("outrider logs --le", tmp_path) == ["--level"]
    where = shlex.join(at(plain))
    # Names that live are offered where the daemon answers within half a second, which a busy one may not.
    for line, names in (
        (f"outrider cordon {where} device he", ["here/CPU", "here"]),
        (f"outrider cordon {where} ta", ["target"]),
        (f"outrider logs {where} --worker t", ["target"]),
    ):
        until(partial(offers, line, tmp_path, names), what=line)
    assert complete_in_bash("outrider logs --socket /none --worker t", tmp_path) == []


@pytest.mark.parametrize(("shell", "word"), [("zsh", "#compdef outrider"), ("fish", "complete --command outrider")])
def test_other_shells_have_a_script(outrider, shell, word):
    code, script, _ = outrider("completion", shell)
    assert code == 0
    assert word in script
    assert outrider("completion", "tcsh").returncode == 2


async def until_shown(pilot: Pilot[None], found: Callable[[], object], what: str) -> None:
    """Wait until the screen of a program is so."""
    deadline = time.monotonic() + WITHIN_S
    while not found():
        assert time.monotonic() < deadline, what
        await pilot.pause(0.05)


async def send_on_and_on(daemon: Daemon) -> None:
    """Ask for completions, one after the other, until cancelled."""
    async with httpx.AsyncClient(base_url=daemon.url, timeout=WITHIN_S) as client:
        while True:
            (
                await client.post("/v1/completions", json=ASK | {"max_tokens": 3000, "ignore_eos": True})
            ).raise_for_status()


async def test_top_shows_sorts_and_filters(plain):
    app = TopApp(partial(look_at_fleet, plain.admin), 0.2)
    async with app.run_test(size=(160, 48)) as pilot:
        tables = {str(table.id): table for table in app.query(FleetTable)}
        replicas, devices, requests = tables["replicas"], tables["devices"], tables["requests"]
        await until_shown(pilot, lambda: replicas.row_count and devices.row_count, "replicas and devices")
        assert str(replicas.get_row_at(0)[0]) == "target"
        assert any("here/CPU" in str(devices.get_row_at(row)[0]) for row in range(devices.row_count))
        assert tables["drafts"].row_count == 0  # it serves without drafts
        sending = asyncio.create_task(send_on_and_on(plain))
        try:
            await until_shown(pilot, lambda: requests.row_count or sending.done(), "a request")
            assert str(requests.get_row_at(0)[0]).startswith("cmpl-")
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        assert app.table is replicas
        await pilot.press("s")
        await until_shown(pilot, lambda: "by state" in str(replicas.border_title), "sorted by state")
        await pilot.press("r")
        await until_shown(pilot, lambda: "↓" in str(replicas.border_title), "the other way round")
        # Only of a load that was measured it is known that it is a number, and sorted as one.
        await until_shown(pilot, lambda: devices.row_count and str(devices.get_row_at(0)[1]) != "-", "a load")
        await pilot.press("tab", "tab", "tab")
        await until_shown(pilot, lambda: app.table is devices, "the focus on devices")
        await pilot.press("s")
        await until_shown(pilot, lambda: "by ours ↓" in str(devices.border_title), "devices by load")
        await pilot.press("slash")
        await until_shown(pilot, lambda: isinstance(app.focused, Input), "a field for the filter")
        await pilot.press(*"here", "enter")
        await until_shown(pilot, lambda: replicas.row_count == 0 and devices.row_count, "what is here")
        await until_shown(pilot, lambda: app.focused is replicas, "the focus on replicas")
        await pilot.press("escape")
        await until_shown(pilot, lambda: replicas.row_count == 1, "all rows")
        await pilot.press("q")
    assert app.return_code == 0


async def test_top_says_that_the_daemon_is_away_and_goes_on():
    def ask() -> dict[str, Any]:
        raise StatusError("no daemon answers on /none")

    app = TopApp(ask, 0.2)
    async with app.run_test() as pilot:
        await until_shown(pilot, lambda: app.query_one("#away").has_class("on"), "that the daemon is away")
        await pilot.press("q")


def test_top_starts_and_quits_in_a_terminal(plain):
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
    shown = bytearray()
    with subprocess.Popen(
        [*ENTRY, "top", *at(plain)],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=os.environ | {"TERM": "xterm-256color"},
        start_new_session=True,
    ) as process:
        os.close(terminal)

        def read() -> None:
            try:
                while piece := os.read(controller, 65536):
                    shown.extend(piece)
            except OSError:  # the terminal is gone with its last process
                return

        reader = threading.Thread(target=read)
        reader.start()
        try:
            try:
                until(lambda: b"here/CPU" in shown or process.poll() is not None, what="the screen shows devices")
            except AssertionError as error:
                error.add_note(f"exit code {process.poll()}, and on the screen: {bytes(shown[-4000:])!r}")
                raise
            assert process.poll() is None, shown.decode(errors="replace")
            os.write(controller, b"q")
            assert process.wait(WITHIN_S) == 0
        finally:
            if process.poll() is None:
                process.kill()
            reader.join(WITHIN_S)
            os.close(controller)
    assert b"\x1b[?1049l" in shown  # the screen is as it was before


def test_top_needs_a_terminal(plain):
    done = run_entry("top", *at(plain))
    assert done.returncode == 1
    assert "status --watch --json" in done.stderr
