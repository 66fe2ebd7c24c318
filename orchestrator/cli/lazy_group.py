"""Commands that are imported when they are run, so that none waits for what only another one needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer._click.shell_completion import CompletionItem
from typer.core import TyperGroup
from typer.main import get_command, get_group

# Typer carries its own copy of click, whose types have no public names.
_Context = Any
_Command = Any


class LazyGroup(TyperGroup):
    """A group whose commands stand in a table: a command's name, and `module:attribute` of its function or `Typer`.
    Its help shows them in that order."""

    places: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        names: dict[str, Any] = dict.fromkeys(self.places)
        self.commands = names  # the names alone, which are offered where one is mistyped

    def list_commands(self, ctx: _Context) -> list[str]:
        """Return the names of the commands. Imports none."""
        return list(self.places)

    def shell_complete(self, ctx: _Context, incomplete: str) -> list[Any]:
        """Return what a shell may complete to. Imports no command for the names of them."""
        if incomplete.startswith("-") or not self.places:
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name) for name in self.list_commands(ctx) if name.startswith(incomplete)]

    def get_command(self, ctx: _Context, cmd_name: str) -> _Command:
        """Return a command, imported now; None where the table has none of that name."""
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
