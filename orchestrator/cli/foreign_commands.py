"""Commands that other distributions bring, as Python entry points.

    [project.entry-points."outrider.commands"]
    measure = "my_package.cli:app"

The name is the command's. What it names is a `typer.Typer`, or a function as typer takes one. Outrider's own commands
keep their names. The laboratory's are known by name, so that whoever lacks it is told what to install.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import typer
from typer.main import get_command

from orchestrator.cli.lazy_group import build_command
from orchestrator.errors import OutriderError

GROUP = "outrider.commands"
LABORATORY = ("bench", "simulate")
"""The commands of outrider-lab."""
INSTALL = "pip install ./outrider_lab-VERSION-py3-none-any.whl, or pip install -e tools/lab in a checkout"


class CommandUnavailable(OutriderError):
    """A command of another distribution cannot be run here."""


def list_names() -> list[str]:
    """Return the names of the laboratory's commands, installed or not, and of all others. Imports none."""
    return list(dict.fromkeys([*LABORATORY, *(sorted(entry.name for entry in entry_points(group=GROUP)))]))


def find_command(name: str) -> Any | None:
    """Return the command of that name, imported now; None where nobody brings one.

    One of the laboratory that is not here, one that two distributions bring and one that cannot be loaded say so when
    they are run.
    """
    entries = list(entry_points(group=GROUP, name=name))
    if not entries:
        missing = f"it is in outrider-lab, which is not installed here: {INSTALL}"
        return _build_refusal(name, missing) if name in LABORATORY else None
    dists = (entry.dist for entry in entries)
    owners = sorted(f"{dist.name} {dist.version}" if dist is not None else "an unknown distribution" for dist in dists)
    if len(entries) > 1:
        return _build_refusal(name, f"{' and '.join(owners)} bring it: uninstall all but one")
    try:
        return build_command(entries[0].load(), name)
    except (Exception, SystemExit) as error:  # nobody here knows that code
        return _build_refusal(name, f"{owners[0]} brings it, and it cannot be loaded: {error!r}")


def _build_refusal(name: str, problem: str) -> Any:
    """Return a command that takes whatever it is given, and raises CommandUnavailable."""

    def refuse() -> None:
        raise CommandUnavailable(f"{name}: {problem}")

    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    text = f"Not to be run here: {problem}."
    parent = typer.Typer(add_completion=False)
    parent.command(name, help=text, add_help_option=False, context_settings=anything)(refuse)
    return get_command(parent)
