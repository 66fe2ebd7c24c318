"""Adapters that other distributions bring, as Python entry points.

    [project.entry-points."outrider.adapters"]
    my_npu = "my_package.adapter:MyAdapter"

The name is the adapter's, as `model.adapter` has it. What it names makes the adapter when it is called without
arguments. See docs/adapters.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version

from adapters.contract import Adapter, AdapterUnavailable
from adapters.names import ADAPTER_NAME_PATTERN, OWN_ADAPTERS

GROUP = "outrider.adapters"
_RESERVED = ("auto",)
_METHODS = ("devices", "classes", "recipe", "prepare", "load")


@dataclass(frozen=True, slots=True)
class ForeignAdapter:
    """An adapter of another distribution, as its metadata tell it; nothing of it is imported."""

    name: str
    distribution: str
    version: str
    entry: EntryPoint


@dataclass(frozen=True, slots=True)
class RefusedAdapter:
    """One that is not used, and why. Its name may be that of an adapter that is."""

    name: str
    distribution: str
    problem: str


@dataclass(frozen=True, slots=True)
class ForeignAdapters:
    usable: Mapping[str, ForeignAdapter] = field(default_factory=dict)
    refused: Sequence[RefusedAdapter] = ()


@cache
def find_foreign() -> ForeignAdapters:
    """Return what is installed, by metadata alone. A name that two distributions want is nobody's: which of them runs
    a model must not depend on the order of a path."""
    claims: dict[str, list[ForeignAdapter]] = {}
    for entry in entry_points(group=GROUP):
        name = entry.dist.name if entry.dist is not None else "an unknown distribution"
        release = entry.dist.version if entry.dist is not None else ""
        claims.setdefault(entry.name, []).append(ForeignAdapter(entry.name, name, release, entry))
    usable: dict[str, ForeignAdapter] = {}
    refused: list[RefusedAdapter] = []
    for name, claimed in sorted(claims.items()):
        problem = _find_problem(name, claimed)
        if problem:
            refused += [RefusedAdapter(name, adapter.distribution, problem) for adapter in claimed]
        else:
            usable[name] = claimed[0]
    return ForeignAdapters(usable, tuple(refused))


def _find_problem(name: str, claimed: Sequence[ForeignAdapter]) -> str:
    if name in (*OWN_ADAPTERS, *_RESERVED):
        return f"the name {name!r} is Outrider's own"
    if not re.fullmatch(ADAPTER_NAME_PATTERN, name):
        return f"{name!r} is no adapter's name: lower case letters, digits and underscores, a letter first"
    owners = sorted(adapter.distribution for adapter in claimed)
    if len(claimed) > 1:
        return f"the name {name!r} is claimed by {' and '.join(owners)}: uninstall all but one"
    return ""


def list_foreign() -> tuple[list[str], list[str]]:
    """Return the names of other distributions' adapters, and a line for each that is not used."""
    foreign = find_foreign()
    return list(foreign.usable), [
        f"{adapter.distribution} brings one that is not used: {adapter.problem}" for adapter in foreign.refused
    ]


def describe_foreign(name: str) -> str:
    adapter = find_foreign().usable[name]
    return f"the adapter {name} of {adapter.distribution} {adapter.version}".rstrip()


def load_foreign(name: str) -> Adapter:
    """Return a new adapter of another distribution. Raises AdapterUnavailable where there is none of that name, or
    where its import or its factory fails."""
    foreign = find_foreign()
    if name not in foreign.usable:
        problems = [f"{refused.distribution}: {refused.problem}" for refused in foreign.refused if refused.name == name]
        known = ", ".join(sorted([*OWN_ADAPTERS, *foreign.usable]))
        raise AdapterUnavailable("; ".join(problems) or f"no adapter is called {name!r}; there are {known}")
    try:
        adapter: Adapter = foreign.usable[name].entry.load()()
        missing = [method for method in _METHODS if not callable(getattr(adapter, method, None))]
        called = getattr(adapter, "name", None)
    except AdapterUnavailable:
        raise
    except (Exception, SystemExit) as error:
        raise AdapterUnavailable(f"{describe_foreign(name)} cannot be made: {error!r}") from error
    if missing:
        raise AdapterUnavailable(f"{describe_foreign(name)} is no adapter: it has no {', '.join(missing)}")
    if called != name:
        raise AdapterUnavailable(f"{describe_foreign(name)} calls itself {called!r}: its `name` is to be {name!r}")
    return adapter


def distribution_version(name: str) -> str:
    """Return the distribution that an adapter comes from, and its version. Raises AdapterUnavailable."""
    adapter = find_foreign().usable.get(name)
    if adapter is None:
        raise AdapterUnavailable(f"no adapter is called {name!r}")
    try:
        return f"{adapter.distribution} {version(adapter.distribution)}"
    except PackageNotFoundError:
        return adapter.distribution
