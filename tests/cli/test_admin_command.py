"""Commands that ask a daemon have the same options behind their own, and print its answer as it is with --json."""

import json
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from orchestrator.cli import admin_command
from orchestrator.cli.admin_command import Daemon, daemon_command

ANSWER = {"parts": [1, 2]}


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setattr(admin_command, "query_daemon", lambda place, *_, **__: {**ANSWER, "place": str(place)})
    made = typer.Typer()

    @made.command()
    @admin_command.admin_command
    def ask(daemon: Daemon, name: str, most: int = 1) -> None:
        """Ask."""
        answer: dict[str, Any] = daemon.ask(f"/admin/{name}")
        typer.echo(f"{most} of {answer['parts']} at {answer['place']}")

    @made.command()
    @daemon_command
    def find(daemon: Daemon, *, last: Annotated[bool, typer.Option("--last")] = False) -> None:
        """Find."""
        typer.echo(f"{daemon.find_place()} {last}")

    return made


def run(app: typer.Typer, *arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


def test_the_daemon_is_the_one_that_the_options_name(app: typer.Typer) -> None:
    assert run(app, "ask", "x", "--most", "2", "--socket", "/run/a.sock") == "2 of [1, 2] at /run/a.sock\n"
    assert run(app, "find", "--url", "http://127.0.0.1:1", "--last") == "http://127.0.0.1:1 True\n"


def test_json_is_the_answer_and_nothing_else(app: typer.Typer, tmp_path: Path) -> None:
    told = run(app, "ask", "x", "--json", "--socket", str(tmp_path / "b.sock"))
    assert json.loads(told) == {**ANSWER, "place": str(tmp_path / "b.sock")}


def test_the_daemons_options_stand_behind_a_commands_own_and_before_keywords(app: typer.Typer) -> None:
    order = ("--most", "--config", "--port", "--socket", "--url", "--json")
    places = [run(app, "ask", "--help").index(f" {option} ") for option in order]
    assert places == sorted(places)
    shown = run(app, "find", "--help")
    assert shown.index(" --url ") < shown.index(" --last ")
    assert "--json" not in shown
