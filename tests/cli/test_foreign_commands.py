"""Commands of other distributions: run by their names; those that are missing or broken say so in a line."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import foreign_commands
from tests.support.foreign_adapter import write_distribution

GREET = """
import typer
app = typer.Typer()

@app.command()
def twice(name: str) -> None:
    print(f"hello {name}, hello {name}")

@app.command()
def once(name: str) -> None:
    print(f"hello {name}")

def shout(name: str, loud: bool = False) -> None:
    print(name.upper() + "!" * loud)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which distributions are installed."""
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.syspath_prepend(str(path))
    return path


def install(site: Path, distribution: str, module: str, code: str = GREET, **entries: str) -> None:
    write_distribution(site, distribution, module, code, group="outrider.commands", **entries)


def test_a_group_and_a_function_are_commands_with_their_options_and_help(site, outrider):
    install(site, "greeter", "greeter_a", greet="greeter_a:app", shout="greeter_a:shout")
    assert outrider("greet", "twice", "Ada").stdout == "hello Ada, hello Ada\n"
    assert outrider("shout", "Ada", "--loud").stdout == "ADA!\n"
    assert outrider("greet", "thrice", "Ada").returncode == 2
    shown = outrider("--help").stdout
    assert "greet" in shown
    assert "shout" in shown
    assert "--loud" in outrider("shout", "--help").stdout


def test_our_own_names_stay_ours(site, outrider):
    install(site, "greeter", "greeter_b", doctor="greeter_b:shout")
    assert "ADA" not in outrider("doctor", "Ada").stdout


def test_a_name_that_two_bring_is_nobodys(site, outrider):
    install(site, "greeter", "greeter_c", greet="greeter_c:app")
    install(site, "other-greeter", "greeter_d", greet="greeter_d:app")
    done = outrider("greet", "once", "Ada")
    assert done.returncode == 1
    assert done.stderr == "outrider: greet: greeter 0.1 and other-greeter 0.1 bring it: uninstall all but one\n"


@pytest.mark.parametrize("code", ["import no_such_module", "raise SystemExit(0)", "pass"])
def test_one_that_cannot_be_loaded_says_so_and_ends_nothing_else(site, outrider, code):
    install(site, "broken", "broken_commands", code, burst="broken_commands:app")
    done = outrider("burst", "--anything", "at", "all")
    assert done.returncode == 1
    assert done.stderr.startswith("outrider: burst: broken 0.1 brings it, and it cannot be loaded: ")
    assert len(done.stderr.splitlines()) == 1
    assert outrider("--help").returncode == 0


@pytest.mark.parametrize("arguments", [("bench",), ("bench", "decode", "--prompts", "x"), ("simulate", "--help")])
def test_without_the_laboratory_its_commands_say_what_to_install(monkeypatch, outrider, arguments):
    def list_others(**asked: str) -> list[EntryPoint]:
        entries: Any = entry_points(**asked)
        return [entry for entry in entries if "outrider_lab" not in entry.value]

    monkeypatch.setattr(foreign_commands, "entry_points", list_others)
    done = outrider(*arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"outrider: {arguments[0]}: it is in outrider-lab, which is not installed here: pip install "
    )
    assert outrider("--help").returncode == 0


def test_a_name_that_nobody_brings_is_a_wrong_command(outrider):
    done = outrider("benhc")
    assert done.returncode == 2
    assert "bench" in done.stderr
