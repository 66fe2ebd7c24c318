"""One command measures what workers hold beside what was announced, and prints a table and whether bars are held."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from outrider_lab.measure.announcements import Announced, format_table, judge_cases

from device_profiles.units import MIB
from tests.support.conformance import NO_FORK
from tests.support.tiny_gguf import Tiny, write

CHARACTERS = (*map(chr, range(33, 126)), "xy")


def announce(planned_mib: int, used_mib: int, *, corrected: bool = False, slots: int = 1) -> Announced:
    sizes = {"planned": planned_mib * MIB, "loaded": 0, "used": used_mib * MIB}
    return Announced("onnx_rt", "135M", slots, corrected, {}, **sizes, load=0.0)


def test_a_row_has_the_first_load_and_the_last_of_those_that_go_by_one_before() -> None:
    cases = [announce(110, 100), announce(90, 100, corrected=True), announce(102, 100, corrected=True)]
    *_, row, other = format_table([*cases, announce(2200, 2000, slots=16)])
    assert row == "| `onnx_rt` | 135M | 1 | 110 | 100 | +10.0% | 102 | 100 | +2.0% |"
    assert other == "| `onnx_rt` | 135M | 16 | 2,200 | 2,000 | +10.0% | | | |"


@pytest.mark.parametrize(
    ("planned_mib", "held"),
    [([106, 94, 114], True), ([108, 92, 100], False), ([100, 100, 116], False), ([100, 100, 84], False), ([0], False)],
)
def test_the_bars_are_of_the_largest_error_and_of_the_median(planned_mib: list[int], held: bool) -> None:
    ((line, verdict),) = judge_cases([announce(planned, 100) for planned in planned_mib])
    assert verdict is held
    assert line.endswith(f"(bars 15% and 7%: {'held' if held else 'NOT held'})")


@NO_FORK
def test_the_second_load_of_a_model_goes_by_the_first_in_the_table_that_is_printed(tmp_path: Path) -> None:
    width = Tiny("llama", hidden=128, heads=2, kv_heads=1, head_dim=64, context=2048)
    sizes = replace(width, vocabulary=len(CHARACTERS), words=CHARACTERS)
    write(tmp_path / "tiny.gguf", sizes)
    size = ["--model", f"tiny={tmp_path}/tiny.gguf", "--adapter", "llama_cpp", "--slots", "1", "--kv-cache-mib", "4"]
    command = [sys.executable, "-m", "outrider_lab.measure.announcements", *size, "--store", str(tmp_path / "store")]
    done = subprocess.run([*command, "--report", f"{tmp_path}/table.md"], check=False, capture_output=True, text=True)
    report = (tmp_path / "table.md").read_text()
    assert done.stdout.endswith(report)
    (row,) = re.findall(r"(?m)^\| `llama_cpp` \| tiny \| 1 \| (.*) \|$", report)
    planned, used, _, corrected, *_ = row.split(" | ")
    assert abs(int(planned) / int(used) - 1.0) > 0.1, "of a tiny model what no model has is most"
    assert abs(int(corrected) / int(used) - 1.0) < 0.05
    assert done.returncode == ("NOT held" in report)
