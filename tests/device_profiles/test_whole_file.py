"""A file takes another one's place whole, or leaves it as it was."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from device_profiles.whole_file import replace_file

_WRITE_AND_WAIT = """
import sys, time
from pathlib import Path
from device_profiles.whole_file import replace_file
with replace_file(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("written", flush=True)
    time.sleep(60)
"""


def test_a_written_file_takes_the_place_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "note"
    path.write_bytes(b"old")
    with replace_file(path, 0o600, sync=True) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "note"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), replace_file(path) as file:
        file.writelines([b"half", "no bytes"])  # type: ignore[list-item]  # which ends the writing
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_writer_leaves_the_old_file_and_hinders_no_later_one(tmp_path: Path) -> None:
    path = tmp_path / "note"
    path.write_bytes(b"old")
    command = [sys.executable, "-c", _WRITE_AND_WAIT, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
        os.kill(writer.pid, signal.SIGKILL)
    assert path.read_bytes() == b"old"
    with replace_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
