"""The script of a simulated model: how long forwards take, and which one fails how.

Written behind the source, as in `simulated:toy?base_ms=5&row_ms=0.2&fault=abort&at=40&once=/tmp/marker`.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from adapters.contract import (
    CapacityError,
    DeviceLost,
    LayerRange,
    MemoryCorrupt,
    ModelRefused,
    OutOfMemory,
    Overheated,
)
from device_profiles.device_names import find_index

FAULTS = ("", "abort", "segfault", "exit", "hang", "device_lost", "out_of_memory", "ecc", "thermal", "capacity", "nan")

# The `spin` of which only the first device computes while it waits; others sleep.
_FIRST_SPINS = 2
_DRAW_BITS = 32  # of a random number choose a place, the others whether there is one


@dataclass(frozen=True, slots=True)
class Script:
    """A forward takes `base_ms + row_ms * rows`, on the device of number n `other_ms * n` longer, 0 the first. With
    `other_bits` 1 each device has last bits of its own. On the first device a forward
    takes `drift_ms` longer from forward number `drift_at` on. Where `drift_while` names a file, that holds only while
    the file exists. The fault strikes at forward number `at`. Forwards are counted from 1 at the first one that holds
    the token `arm` (-1: since loading; what measures a model when it is loaded counts too). With `once`, it strikes
    only while that file does not exist, and creates it.
    `shift`: it says the tokens that many ids behind the toy's, so it is another model. Where `shift_while` names a
    file, that holds only while the file exists.
    `agree`: the chance that its first choice is the toy's. Elsewhere the toy's is its second choice half of the time,
    else its third or fourth: it is a weaker model of the same family.
    `kernel_rows`: a forward of so many rows or more has another kernel, with other last bits (0: none has). Where
    `kernel_while` names a file, that holds only while the file exists.
    `unsteady`: with 1, every forward has last bits of its own.
    `memory_rows`: a forward of more rows runs out of memory, and a smaller one does not (0: none does).
    `room_kib`: a larger KV cache has no room on its device (0: any has). Where `room_while` names a file, that holds
    only while the file exists.
    `spin`: with 1, a forward computes for its time instead of waiting, so that other programs make it longer; with 2
    on the first device only.
    `layers`: how many it has; a range of them takes its part of the time.
    `garbage`: the logits behind that token, and of all that follows it in its sequence, are NaN (-1: of none)."""

    base_ms: float = 0.0
    row_ms: float = 0.0
    load_ms: float = 0.0
    other_ms: float = 0.0
    other_bits: int = 0
    drift_ms: float = 0.0
    drift_at: int = 0
    drift_while: str = ""
    fault: str = ""
    at: int = 1
    arm: int = -1
    once: str = ""
    shift: int = 0
    shift_while: str = ""
    agree: float = 1.0
    kernel_rows: int = 0
    kernel_while: str = ""
    unsteady: int = 0
    memory_rows: int = 0
    room_kib: int = 0
    room_while: str = ""
    garbage: int = -1
    spin: int = 0
    layers: int = 1

    @classmethod
    def parse(cls, text: str) -> Script:
        """Read `base_ms=5&fault=abort&at=3`. Raises ModelRefused naming the wrong part."""
        kinds: dict[str, Any] = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        values: dict[str, float | int | str] = {}
        for key, value in parse_qsl(text, keep_blank_values=True):
            if key not in kinds:
                raise ModelRefused(f"simulated: no setting is called {key!r}; there are {', '.join(kinds)}")
            try:
                values[key] = kinds[key](value)
            except ValueError:
                raise ModelRefused(f"simulated: {key} must be a {kinds[key].__name__}, not {value!r}") from None
        script = cls(**values)  # type: ignore[arg-type]  # each value was converted to its field's type above
        if script.layers < 1:
            raise ModelRefused(f"simulated: layers must be 1 or more, not {script.layers}")
        if script.fault not in FAULTS:
            raise ModelRefused(f"simulated: no fault is called {script.fault!r}; there are {', '.join(FAULTS[1:])}")
        return script

    def keep(self, layers: LayerRange) -> Script:
        share = (layers.end - layers.first) / self.layers
        times = {name: getattr(self, name) * share for name in ("base_ms", "row_ms", "load_ms", "other_ms", "drift_ms")}
        return dataclasses.replace(self, **times)

    def on(self, device: str) -> Script:
        """Return the script of one device. The number of the device is its `other_bits` where these are its own."""
        number = find_index(device)
        if not number:
            return dataclasses.replace(self, other_bits=0)
        spin, base_ms = 0 if self.spin == _FIRST_SPINS else self.spin, self.base_ms + number * self.other_ms
        return dataclasses.replace(self, base_ms=base_ms, other_bits=number * self.other_bits, drift_ms=0.0, spin=spin)

    def wait(self, rows: int, forward: int) -> None:
        """Take as long as the forward of that number, of `rows` rows, takes."""
        drift_ms = self.drift_ms if forward >= self.drift_at else 0.0
        if drift_ms and not _holds(self.drift_while):
            drift_ms = 0.0
        if total_ms := self.base_ms + self.row_ms * rows + drift_ms:
            (_spin if self.spin else time.sleep)(total_ms / 1000.0)

    def shift_now(self) -> int:
        """Return by how many ids its tokens are behind the toy's now."""
        return self.shift if _holds(self.shift_while) else 0

    def rank_choice(self, draw: int) -> int:
        """Return at which place of its choices the toy's first one stands, 0 the first. `draw` is a random number of 64
        bits."""
        if draw >> _DRAW_BITS < self.agree * (1 << 64 - _DRAW_BITS):
            return 0
        return (1, 1, 2, 3)[draw >> 20 & 3]

    def last_bits(self, rows: int, forward: int) -> float:
        """Return what is added to the logits of the forward of that number: they round in its kernel's own way."""
        kernel = self.kernel_rows > 0 and rows >= self.kernel_rows and _holds(self.kernel_while)
        return 1e-4 * (kernel + (forward % 7 if self.unsteady else 0) + 16 * self.other_bits)

    def check_room(self, kv_cache_bytes: int) -> None:
        """Raise OutOfMemory where its device has no room for a KV cache of so many bytes."""
        if self.room_kib and kv_cache_bytes > self.room_kib << 10 and _holds(self.room_while):
            text = f"{kv_cache_bytes} bytes of KV cache do not fit into {self.room_kib} KiB"
            raise OutOfMemory(f"simulated: {text}")

    def strike(self, forward: int) -> bool:
        """Do what the script says for this forward. Returns True when its logits must be garbage."""
        if not self.fault or forward != self.at or not self._first_time():
            return False
        if self.fault == "abort":
            os.abort()
        if self.fault == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.fault == "exit":
            os._exit(7)
        if self.fault == "hang":
            time.sleep(3600)
        if self.fault == "device_lost":
            raise DeviceLost(f"simulated: the device was lost at forward {forward}")
        if self.fault == "ecc":
            raise MemoryCorrupt(f"simulated: a memory error was not corrected at forward {forward}")
        if self.fault == "thermal":
            raise Overheated(f"simulated: the device was too hot at forward {forward}")
        if self.fault == "capacity":
            raise CapacityError(f"simulated: no KV block is left at forward {forward}")
        if self.fault == "out_of_memory":
            raise OutOfMemory(f"simulated: the device ran out of memory at forward {forward}")
        return True

    def _first_time(self) -> bool:
        if not self.once:
            return True
        try:
            Path(self.once).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _holds(file: str) -> bool:
    return not file or Path(file).exists()


def _spin(seconds: float) -> None:
    """Compute for so much of the processor's time."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass
