"""A model file that comes in parts: package indexes bound the size of a file, so large ones are cut.

`package:NAME/FILE` is found so where the package NAME, or one that it requires, carries FILE.part00, FILE.part01 and so
on. No code of a package runs: what it requires and carries stands in its metadata. Where one of them carries
SHA256SUMS with a line for FILE, the joined file is compared with it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from adapters.contract import ModelRefused, Progress
from device_profiles.units import MIB

SUMS = "SHA256SUMS"
_CHUNK_BYTES = 4 * MIB  # of a copy. Not tuned.
_REQUIRED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SUM = re.compile(r"([0-9a-f]{64}) [ *](.+)")


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the file `name` in order, and what they make together (64 hex digits, "" where nobody says)."""

    name: str
    files: tuple[Path, ...]
    sha256: str


def find_parts(module: str, inside: str) -> Parts | None:
    """Return the parts of the file `inside` an installed package; None where there are none.

    Raises ModelRefused when some of them are missing; the message names their numbers.
    """
    name = Path(inside).name
    carried = [file for package in _packages(module) for file in _files(package)]
    stem = f"{name}.part"
    numbers = {file: file.name.removeprefix(stem) for file in carried if file.name.startswith(stem)}
    numbered = {int(number): file for file, number in numbers.items() if number.isdecimal()}
    if not numbered:
        return None
    first = 0 if 0 in numbered else 1  # some count from 0, some from 1
    missing = sorted(set(range(first, max(numbered) + 1)) - set(numbered))
    if missing:
        which = ", ".join(f"{stem}{number}" for number in missing)
        raise ModelRefused(f"package:{module}/{inside}: {which} is missing. Install again: pip install {module}")
    sums = next((digest for file in carried if file.name == SUMS and (digest := _sum_of(file, name))), "")
    return Parts(name, tuple(numbered[number] for number in sorted(numbered)), sums)


def _packages(module: str) -> Iterator[Distribution]:
    """Yield the distribution that carries a package, and the installed ones that it requires."""
    for name in packages_distributions().get(module, [])[:1]:
        own = distribution(name)
        yield own
        for required in own.requires or []:
            match = _REQUIRED_NAME.match(required)
            with suppress(PackageNotFoundError):  # what an extra asks for need not be there
                if match:
                    yield distribution(match[0])


def _files(package: Distribution) -> list[Path]:
    wanted = [file for file in package.files or [] if file.name == SUMS or ".part" in file.name]
    return [path for path in (Path(str(file.locate())) for file in wanted) if path.is_file()]


def _sum_of(sums: Path, name: str) -> str:
    lines = (_SUM.fullmatch(line.strip()) for line in sums.read_text(encoding="utf-8", errors="replace").splitlines())
    return next((line[1] for line in lines if line and line[2] == name), "")


class JoinedFile:
    """The recipe of the model store that joins parts; the first of them is its source."""

    name = "joined"

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def recipe(self) -> str:
        """Name the file and what it must be."""
        return f"parts joined, 1; {self._parts.name}; sha256 {self._parts.sha256 or 'unknown'}"

    def prepare(self, source: Path, target: Path, progress: Progress) -> None:
        """Write the whole file into the directory `target`. Raises ModelRefused when it is not what it should be."""
        digest = hashlib.sha256()
        with (target / self._parts.name).open("wb") as whole:
            for number, part in enumerate(self._parts.files):
                progress(f"joining {self._parts.name}", number / len(self._parts.files))
                for chunk in _chunks(part):
                    digest.update(chunk)
                    whole.write(chunk)
        if self._parts.sha256 not in ("", digest.hexdigest()):
            raise ModelRefused(
                f"{source.name}: the parts do not make what {SUMS} says of {self._parts.name}. Install them again."
            )


def _chunks(part: Path) -> Iterator[bytes]:
    with part.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk
