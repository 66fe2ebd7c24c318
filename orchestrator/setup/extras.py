"""What `outrider extras` knows: which versions were tested, which are installed, and how pip is to bring the former."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from adapters.builds import BIT_LIBRARIES, find_build
from orchestrator.errors import OutriderError

CONSTRAINTS: Final = Path(__file__).with_name("constraints.txt")
"""The tested version of all that the extras bring, for each Python and processor that they run on. `make lock` makes
it."""
_OWN: Final = "outrider"
_OFFLINE: Final = ("after connection broken by", "Temporary failure in name resolution")
"""What pip says where it reaches no index."""


@dataclass(frozen=True, slots=True)
class Package:
    """What an extra asks for. `installed`: "" where it is not."""

    name: str
    tested: str
    installed: str

    @property
    def differs(self) -> bool:
        """Whether another version is installed than was tested. A build's own mark, as in 2.13.0+cpu, is no other."""
        return bool(self.installed) and Version(self.installed).public != Version(self.tested).public


def read_tested() -> dict[str, str]:
    """Return the tested versions by canonical name, for this interpreter and machine."""
    lines = (line.partition("#")[0].strip() for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines())
    pins = (Requirement(line) for line in lines if line)
    return {
        canonicalize_name(pin.name): next(iter(pin.specifier)).version
        for pin in pins
        if pin.marker is None or pin.marker.evaluate()
    }


def list_extras() -> dict[str, list[Requirement]]:
    """Return what each extra asks for on this machine. Those of a checkout (`dev`) are left out: no wheel pins them."""
    requires = [Requirement(line) for line in metadata.requires(_OWN) or ()]
    extras: dict[str, list[Requirement]] = {}
    for extra in sorted(metadata.metadata(_OWN).get_all("Provides-Extra") or ()):
        named = (need for need in requires if need.marker is not None and not need.marker.evaluate({"extra": ""}))
        mine = [need for need in named if need.marker is not None and need.marker.evaluate({"extra": extra})]
        if not any(canonicalize_name(need.name) == _OWN for need in mine):
            extras[extra] = mine
    return extras


def describe_extra(needs: Sequence[Requirement], tested: dict[str, str]) -> list[Package]:
    """Return what is installed of an extra, beside what was tested."""
    return [Package(need.name, tested[canonicalize_name(need.name)], find_version(need.name)) for need in needs]


def list_untested() -> list[Package]:
    """Return what decides bits here, and is installed in another version than was tested."""
    tested = read_tested()
    packages = (Package(name, tested[name], find_version(name)) for name in BIT_LIBRARIES if name in tested)
    return [package for package in packages if package.differs]


def find_version(name: str) -> str:
    """Return the installed version of a library, in whichever build it came; "" where it is not installed."""
    build = find_build(name)
    return build[1] if build is not None else ""


def choose_extras(names: Sequence[str]) -> list[Requirement]:
    """Return what these extras ask for on this machine, each once. Raises OutriderError."""
    extras = list_extras()
    if unknown := [name for name in names if name not in extras]:
        raise OutriderError(f"there is no extra {unknown[0]!r}; there is {', '.join(extras)}")
    if empty := [name for name in names if not extras[name]]:
        raise OutriderError(f"the extra {empty[0]!r} has nothing for this machine ({metadata_platform()})")
    return list({str(need): need for name in names for need in extras[name]}.values())


def metadata_platform() -> str:
    """Return this machine's system and processor, as markers of packages name them."""
    from packaging.markers import default_environment

    environment = default_environment()
    return f"{environment['sys_platform']}, {environment['platform_machine']}"


def build_command(needs: Sequence[Requirement]) -> list[str]:
    """Return the command line by which this interpreter's pip brings the tested versions."""
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--constraint", str(CONSTRAINTS)]
    return [*pip, *(_without_marker(need) for need in needs if not _has_other_build(need))]


def install(needs: Sequence[Requirement], *, quiet: bool) -> None:
    """Run that command. `quiet`: pip says nothing on standard output. Raises OutriderError where there is no pip, no
    package index answers, or pip fails."""
    command = build_command(needs)
    if importlib.util.find_spec("pip") is None:
        instead = shlex.join(["uv", "pip", "install", "--python", sys.executable, *command[5:]])
        raise OutriderError(f"{sys.executable} has no pip: run `{sys.executable} -m ensurepip`, or {instead}")
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL if quiet else None, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode == 0:
        return
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if any(mark in line for line in lines for mark in _OFFLINE):
        raise OutriderError(
            "pip reaches no package index: set PIP_INDEX_URL to one of yours, or PIP_FIND_LINKS to a directory of "
            "wheels and PIP_NO_INDEX=1"
        )
    wrong = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-1:]
    wanted = ", ".join(f"{package.name} {package.tested}" for package in describe_extra(needs, read_tested()))
    raise OutriderError(f"pip does not bring {wanted}: {wrong[0] if wrong else f'it ended with {done.returncode}'}")


def _has_other_build(need: Requirement) -> bool:
    """Return whether a library is here in another build, as onnxruntime-gpu, whose files this one would replace."""
    build = find_build(need.name)
    return build is not None and build[0] != need.name


def _without_marker(need: Requirement) -> str:
    """Return a requirement for a command line: its marker holds here, or it would not be asked for."""
    bare = Requirement(str(need))
    bare.marker = None
    return str(bare)
