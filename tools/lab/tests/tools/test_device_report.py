"""The report on a machine's devices: each part is a process, and what fails or hangs is told beside what did not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from outrider_lab.measure.devices import Outcome, Part, list_devices, list_parts, run_part, write_report

from adapters import registry

CLASSES = {
    "class": "fp32, KV fp16",
    "class_fingerprint": "0123456789abcdef",
    "weights": "int4",
    "row_invariant": True,
    "mismatches": 0,
    "compared": 32,
    "candidates": [
        {"class": "a", "passed": True, "why": "", "decode_ms": {"1": 2.0}, "prefill_ms": 30.0, "prefill_tokens": 96},
        {
            "class": "b",
            "passed": False,
            "why": "2 rows at a time",
            "decode_ms": {},
            "prefill_ms": 0,
            "prefill_tokens": 0,
        },
    ],
}


def run(text: str, *, limit_s: float = 60.0) -> Outcome:
    """Run a part that is this Python text, and whose lines are those that it prints."""

    def read(printed: str) -> list[str]:
        if "figure" not in printed:
            raise ValueError("no figure")
        return printed.splitlines()

    return run_part(Part("bench", [sys.executable, "-c", text], read), limit_s)


def test_what_a_part_prints_is_told_and_its_failure_with_its_last_words() -> None:
    assert run("print('a figure')").lines == ["a figure"]
    failed = run("import sys; print('before'); sys.exit('cuda: no kernel image')")
    assert failed.lines == []
    assert "ended with 1" in failed.failure
    assert "cuda: no kernel image" in failed.failure
    partly = run("import sys; print('a figure'); sys.exit(3)")
    assert (partly.lines, partly.failure) == (["a figure"], "ended with 3")


def test_a_part_that_hangs_is_ended_and_told() -> None:
    hung = run("import time; print('began', flush=True); time.sleep(600)", limit_s=0.5)
    assert hung.failure.startswith("was not done after 0 s")


def test_every_part_of_a_device_is_read_into_a_report_that_names_no_place(tmp_path: Path) -> None:
    (device,) = [device for device in registry.list_devices("simulated") if device.name == "SIM"]
    suite, classes, memory, bench = list_parts(device, "simulated:toy", tmp_path)
    compile((tmp_path / "test_suite.py").read_text(), "test_suite.py", "exec")
    (tmp_path / "classes.json").write_text(json.dumps({"summary": CLASSES}))
    (tmp_path / "memory.json").write_text(json.dumps({"planned of target": 1 << 30, "host's peak of target": 1 << 29}))
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "report.md").write_text(f"# Compared\n\nin {Path.home()}/somewhere\n")
    printed = "FAILED test_suite.py::test_rows - assert 0\n1 failed, 41 passed, 2 skipped in 3.21s\n"
    texts = {"conformance": printed, "classes": "", "memory": "", "bench": ""}
    parts = (suite, classes, memory, bench)
    outcomes = [Outcome(part.title, part.read(texts[part.title]), "", 1.0) for part in parts]
    report = write_report([(device, outcomes)], ["torch_device: not installed"], "/home/me/model.gguf", 90.0)
    for line in (
        "## simulated SIM",
        "- FAILED test_suite.py::test_rows - assert 0",
        "- 1 failed, 41 passed, 2 skipped in 3.21s",
        "- texts that drafts change: 0 of 32",
        "| b | no: 2 rows at a time |  |  |",
        "| planned of target | 1073741824 | 1.0 GiB |",
        "#### Compared",
        "- not here: torch_device: not installed",
    ):
        assert line in report.splitlines(), line
    assert str(Path.home()) not in report
    assert "/home/me" not in report
    with pytest.raises(ValueError, match="did not end"):
        suite.read("killed")


def test_where_there_is_no_other_device_the_processor_is_rehearsed_with() -> None:
    devices, _ = list_devices([])
    assert devices
    assert all(device.adapter != "simulated" for device in devices)
    (chosen,), _ = list_devices(["simulated:sim"])
    assert chosen.name == "SIM"
