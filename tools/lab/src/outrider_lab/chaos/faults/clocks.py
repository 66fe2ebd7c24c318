"""The wall clock jumps. Linux has no name space for it, and setting the machine's own would strike everybody on it.

So the daemon and its workers run with a small library before libc, which adds an offset from a file to every wall clock
that they ask for. It needs a C compiler. Times of files, and of other processes, stay as they are.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from pathlib import Path

from outrider_lab.chaos.faults.base import Fault, NoTarget
from outrider_lab.chaos.schedule import Shape
from outrider_lab.chaos.service import ChaosError, Layout

SOURCE = Path(__file__).resolve().parents[1] / "wall_clock.c"
VARIABLE = "OUTRIDER_CHAOS_CLOCK"
JUMPS_S = (3600, -3600, 86_400, -86_400, 30, -30)


def build_shim(directory: Path) -> dict[str, str]:
    """Compile the library, and write the file of its offset; returns the environment that has it. Raises ChaosError."""
    library, offset = directory / "wall_clock.so", directory / "wall_clock.offset"
    set_offset(offset, 0)
    compiler = shutil.which("cc") or "cc"
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ChaosError(f"{SOURCE.name} cannot be compiled: {done.stderr.strip()}")
    return {"LD_PRELOAD": str(library), VARIABLE: str(offset)}


def set_offset(path: Path, seconds: int) -> None:
    """Let the wall clock be so far from the machine's."""
    data = struct.pack("=q", seconds)
    if path.exists():
        with path.open("r+b") as file:  # the processes have it mapped: it must stay the same file
            file.write(data)
    else:
        path.write_bytes(data)


class ClockJump(Fault):
    """The wall clock of the daemon and its workers jumps, and jumps back. Nobody may be restarted for it."""

    kind = "clock-jump"
    group = "clock-jump"
    description = "the wall clock that the daemon and its workers ask for jumps by up to a day, and back"
    shape = Shape(1, 3.0, 8.0)

    @classmethod
    def find_obstacle(cls, layout: Layout) -> str:
        if sys.platform != "linux" or shutil.which("cc") is None:
            return "a library in front of libc needs Linux and a C compiler"
        return ""

    async def inject(self) -> None:
        if self.arena.clock is None:
            raise NoTarget("the daemon runs without the shim")
        jump_s = JUMPS_S[int(self.planned.pick * len(JUMPS_S))]
        self.blame(detail=f"the wall clock is {jump_s:+} s off")
        set_offset(self.arena.clock, jump_s)

    async def heal(self) -> None:
        if self.arena.clock is not None:
            set_offset(self.arena.clock, 0)
