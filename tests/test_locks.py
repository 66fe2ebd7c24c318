"""`locks/`: what users install has the tested versions, all that it needs, and a hash for each file."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = ("run.txt", "ray.txt", "torch.txt", "model.txt")
CARRIED = "../orchestrator/setup/constraints.txt"
"""What the wheel carries for `outrider extras install`."""
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)


def read_pins(path: Path) -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in PINNED.findall(path.read_text(encoding="utf-8"))}


def list_needed(lock: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = {
        "run.txt": [*project["dependencies"], *extras["demo"], *extras["llama"], *extras["top"]],
        "ray.txt": extras["ray"],
        "torch.txt": [*project["dependencies"], *extras["torch"], *extras["quantize"]],
        CARRIED: [line for name, lines in extras.items() if name != "dev" for line in lines],
    }[lock]
    needs = [Requirement(line) for line in lines]
    return [need for need in needs if need.marker is None or need.marker.evaluate()]


@pytest.mark.parametrize("name", [*LOCKS, CARRIED])
def test_versions_are_those_of_the_constraints(name):
    constraints = read_pins(ROOT / "constraints.txt")
    locked = read_pins(ROOT / "locks" / name)
    assert locked
    known = {package: version for package, version in locked.items() if package in constraints}
    assert known == {package: constraints[package] for package in known}


@pytest.mark.parametrize("lock", ["run.txt", "ray.txt", "torch.txt", CARRIED])
def test_what_is_needed_is_locked_with_all_that_it_needs(lock):
    locked, constraints = read_pins(ROOT / "locks" / lock), read_pins(ROOT / "constraints.txt")
    waiting, seen = list_needed(lock), set()
    while waiting:
        need = waiting.pop()
        name = canonicalize_name(need.name)
        assert name in locked, f"{name} is not in locks/{lock}: run `make lock`"
        assert name in constraints, f"{name} has no line in constraints.txt"
        assert need.specifier.contains(locked[name], prereleases=True), f"locks/{lock} is older than {need}"
        if (name, *sorted(need.extras)) in seen:
            continue
        seen.add((name, *sorted(need.extras)))
        for line in distribution(name).requires or ():
            further = Requirement(line)
            for extra in ("", *need.extras):
                if further.marker is None or further.marker.evaluate({"extra": extra}):
                    waiting.append(further)
                    break


@pytest.mark.parametrize("name", LOCKS)
def test_each_file_has_a_hash_and_no_line_names_a_registry(name):
    text = (ROOT / "locks" / name).read_text(encoding="utf-8")
    entries = re.split(r"\n(?=[A-Za-z0-9])", text.partition("make lock\n")[2])
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "://" not in text
    assert "index-url" not in text
