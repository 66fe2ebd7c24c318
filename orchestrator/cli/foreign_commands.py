"""Commands that other distributions bring, as Python entry points.

    [project.entry-points."outrider.commands"]
    measure = "my_package.cli:app"

The name is the command's. What it names is a `typer.Typer`, or a function as typer takes one. Outrider's own commands
keep their names. The laboratory's are known by name, so that whoever lacks it is told what to install.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar

import typer
from typer._click.shell_completion import CompletionItem
from typer.core import TyperGroup
from typer.main import get_command, get_group

from orchestrator.errors import OutriderError

# Typer carries its own copy of click, whose types have no public names.
_Context = Any
_Command = Any
GROUP = "outrider.commands"
LABORATORY = ("bench", "simulate")
INSTALL = "pip install ./outrider_lab-VERSION-py3-none-any.whl, or pip install -e tools/lab in a checkout"


class LazyGroup(TyperGroup):
    """A group whose commands stand in a table: a command's name, and `module:attribute` of its function or `Typer`.
    Its help shows them in that order."""

    places: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        names: dict[str, Any] = dict.fromkeys(self.places)
        self.commands = names  # the names alone, which are offered where one is mistyped

    def list_commands(self, ctx: _Context) -> list[str]:
        return list(self.places)

    def shell_complete(self, ctx: _Context, incomplete: str) -> list[Any]:
        """Return what a shell may complete to. Imports no command for the names of them."""
        if incomplete.startswith("-") or not self.places:
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name) for name in self.list_commands(ctx) if name.startswith(incomplete)]

    def get_command(self, ctx: _Context, cmd_name: str) -> _Command:
        place = self.places.get(cmd_name)
        if place is None:
            return None
        module, _, attribute = place.partition(":")
        return build_command(getattr(import_module(module), attribute), cmd_name)


def build_command(definition: typer.Typer | Callable[..., Any], name: str) -> _Command:
    """Return the command of a `Typer` or of a function."""
    parent = typer.Typer(add_completion=False)
    if isinstance(definition, typer.Typer):
        parent.add_typer(definition, name=name)
        return get_group(parent).commands[name]
    parent.command(name)(definition)
    return get_command(parent)


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
    def refuse() -> None:
        raise CommandUnavailable(f"{name}: {problem}")

    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    text = f"Not to be run here: {problem}."
    parent = typer.Typer(add_completion=False)
    parent.command(name, help=text, add_help_option=False, context_settings=anything)(refuse)
    return get_command(parent)
