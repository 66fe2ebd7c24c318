"""What Outrider does on the devices of a machine, as a report to send: for whoever has a GPU and twenty minutes.

    python -m outrider_lab.measure.devices --report report.md [--source MODEL] [--only RUNTIME:DEVICE] [--minutes 20]

It takes each device that is no processor, and the processor where there is none: then it is a rehearsal. Each part is a
process of its own with a time limit, so that one that fails or hangs is told and the others go on:

- conformance: the suite that every adapter passes (docs/adapters.md), over the first two layers of a GGUF file.
- classes: numerical classes, those that failed with the reason, and whether drafts change the text of six prompts,
  greedy and seeded, alone and beside others (`outrider bench exactness`).
- memory: a daemon under load, planned beside what its process and the device held (outrider_lab.measure.memory).
- bench: tokens a second beside llama-server (`outrider bench compare`), and vLLM where it is on PATH and `--source` is
  a directory.

The report names devices, versions and figures, and neither user nor paths.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from adapters import registry
from adapters.contract import AdapterUnavailable
from adapters.hardware import hardware, processor, runtime_version
from adapters.model_source import resolve
from adapters.parent_process import end_with_parent
from adapters.vocabulary import SIMULATED_PREFIX
from device_profiles.device_names import is_processor, is_same_device
from device_profiles.profile import DeviceProfile
from device_profiles.units import human_bytes
from orchestrator.daemon.systemd.files import DEFAULT_MODEL
from outrider_lab.free_port import find_free_port, wait_until_served
from outrider_lab.gguf_layers import Layer, write_layers

_SHARES = {"conformance": 0.2, "classes": 0.4, "memory": 0.15, "bench": 0.25}
"""Of a device's time, what each part may take at the most. By what the parts took on two cores; not tuned."""
# Prompts that are compared, all of ours, and tokens of each: enough for a difference of kernels to be seen.
_PROMPTS, _TOKENS = 6, 48
_PEERS = ("--engine", "llama.cpp:plain")
# Lines of what a part that failed printed. The reason stands in the last ones.
_TAIL_LINES = 12
_VLLM_READY_S = 240.0


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the report: the `command` that makes it, and what `read` makes of the files that it wrote."""

    title: str
    command: Sequence[str]
    read: Callable[[str], list[str]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a part: lines of the report, or why there are none."""

    title: str
    lines: list[str]
    failure: str
    took_s: float


def run_part(part: Part, limit_s: float) -> Outcome:
    """Run a part in a process, and end that with its children when the time is over."""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            part.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 -- nothing else runs between fork and exec
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            code = None
        output.seek(0)
        text = output.read()
    took_s = time.monotonic() - started
    try:
        lines = part.read(text)
    except (OSError, ValueError, KeyError) as error:
        tail = "\n".join(text.strip().splitlines()[-_TAIL_LINES:])
        why = f"was not done after {limit_s:.0f} s" if code is None else f"ended with {code} ({error!r})"
        return Outcome(part.title, [], f"{why}:\n\n```\n{tail}\n```", took_s)
    return Outcome(part.title, lines, "" if code == 0 else f"ended with {code}", took_s)


def list_parts(device: DeviceProfile, source: str, work: Path) -> list[Part]:
    """Return the parts of a device; their files are written into `work`."""
    config = work / "cluster.yaml"
    model = {"source": source, "adapter": device.adapter, "device": device.name}
    api = {"port": find_free_port(), "admin_socket": str(work / "admin.sock")}
    settings = {
        "model": model,
        "drafts": [{"method": "suffix"}],
        "api": api,
        "store": {"directory": str(work / "store")},
    }
    config.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    suite, exactness, memory, bench = (
        work / name for name in ("test_suite.py", "classes.json", "memory.json", "bench")
    )
    suite.write_text(_SUITE.format(**model | {"source": _shorten(source, work)}), encoding="utf-8")
    python, outrider = sys.executable, [sys.executable, "-m", "orchestrator.cli.entry"]
    sizes = ["--limit", str(_PROMPTS), "--max-tokens", str(_TOKENS), "--quality-limit", "0", "--config", str(config)]
    return [
        Part(
            "conformance",
            [
                python,
                "-m",
                "pytest",
                "-q",
                "-rf",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:asyncio",
                "-c",
                os.devnull,
                str(suite),
            ],
            _read_conformance,
        ),
        Part(
            "classes",
            [*outrider, "bench", "exactness", *sizes, "--json", str(exactness)],
            lambda _: _format_classes(json.loads(exactness.read_text(encoding="utf-8"))["summary"]),
        ),
        Part(
            "memory",
            [python, "-m", "outrider_lab.measure.memory", "--config", str(config), "--json", str(memory)],
            lambda _: _format_memory(json.loads(memory.read_text(encoding="utf-8"))),
        ),
        Part(
            "bench",
            [*outrider, "bench", "compare", *sizes, "--passes", "1", *_PEERS, "--report", str(bench)],
            lambda _: _demote_headings((bench / "report.md").read_text(encoding="utf-8")),
        ),
    ]


_SUITE = """import pytest
from adapters.conformance import Case
from adapters.conformance.suite import *
from adapters.model_source import resolve
from pathlib import Path


@pytest.fixture(scope="session")
def case():
    return Case(adapter="{adapter}", device="{device}", source=resolve("{source}", Path()).path)
"""


def _shorten(source: str, work: Path) -> str:
    """Return a model of the first two layers of a GGUF file, which has its shapes and kernels; else the source."""
    if source.startswith(SIMULATED_PREFIX) or not (file := resolve(source, Path())).path.is_file():
        return source
    write_layers(work / "layers.gguf", file.path, [Layer(0), Layer(1)])
    return str(work / "layers.gguf")


def _read_conformance(text: str) -> list[str]:
    """Return the failed tests and pytest's last line. Raises ValueError where it came to none."""
    lines = text.strip().splitlines()
    if not lines or " in " not in lines[-1]:
        raise ValueError("the suite did not end")
    return [f"- {line}" for line in lines if line.startswith(("FAILED", "ERROR"))] + [f"- {lines[-1].strip('= ')}"]


def _format_classes(summary: dict[str, Any]) -> list[str]:
    chosen = f"- class {summary['class']}, fingerprint {summary['class_fingerprint'][:12]}"
    compared = f"- texts that drafts change: {summary['mismatches']} of {summary['compared']}"
    rows = ["", "| class | kept bits | ms by rows | prefill |", "|---|---|---|---|"]
    for candidate in summary["candidates"]:
        times = ", ".join(f"{count}: {ms:.2f}" for count, ms in candidate["decode_ms"].items())
        prefill = f"{candidate['prefill_tokens']} tokens in {candidate['prefill_ms']:.0f} ms" if times else ""
        kept = "yes" if candidate["passed"] else f"no: {candidate['why']}"
        rows.append(f"| {candidate['class']} | {kept} | {times} | {prefill} |")
    return [chosen, f"- weights {summary['weights']}, rows invariant: {summary['row_invariant']}", compared, *rows]


def _format_memory(measured: dict[str, Any]) -> list[str]:
    lines = ["| of | bytes | |", "|---|---|---|"]
    for name, count in measured.items():
        lines.append(f"| {name} | {count} | {human_bytes(count)} |")
    return lines


def _demote_headings(text: str) -> list[str]:
    return [f"###{line}" if line.startswith("#") else line for line in text.strip().splitlines()]


@contextmanager
def serve_vllm(source: str, log: Path) -> Iterator[str]:
    """Start vLLM over a directory where it is on PATH, and yield its address, "" where it does not serve."""
    program = shutil.which("vllm")
    if program is None or not Path(source).is_dir():
        yield ""
        return
    port = find_free_port()
    command = [program, "serve", source, "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "4096"]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 -- nothing else runs between fork and exec
        )
    url = f"http://127.0.0.1:{port}/v1"
    try:
        yield url if wait_until_served(server, f"{url}/models", _VLLM_READY_S) else ""
    finally:
        os.killpg(server.pid, 15)
        server.wait()


def list_devices(only: Sequence[str]) -> tuple[list[DeviceProfile], list[str]]:
    """Return the devices to measure, and why runtimes are left out. `only`: RUNTIME:DEVICE each."""
    devices: list[DeviceProfile] = []
    missing: list[str] = []
    for name in registry.names():
        try:
            devices += registry.list_devices(name)
        except AdapterUnavailable as error:
            missing.append(f"{name}: {error}")
    if only:
        named = [text.partition(":")[::2] for text in only]
        wanted = [d for d in devices if any(d.adapter == of and is_same_device(at, d.name) for of, at in named)]
        return wanted, missing
    real = [device for device in devices if device.adapter != "simulated"]
    return [device for device in real if not is_processor(device.name)] or real, missing


def write_report(
    devices: Sequence[tuple[DeviceProfile, Sequence[Outcome]]], missing: Sequence[str], source: str, took_s: float
) -> str:
    own = processor()
    lines = [
        "# Devices",
        "",
        f"Made by `outrider_lab.measure.devices` on {datetime.now(UTC):%Y-%m-%d} in {took_s / 60:.0f} minutes, over "
        f"`{Path(source).name if '://' not in source else source}`.",
        "",
        f"- {platform.platform()}, Python {platform.python_version()}, {own.name}: {', '.join(own.isa)}",
        *(f"- not here: {text}" for text in missing),
    ]
    if all(is_processor(device.name) for device, _ in devices):
        lines.append("- **A rehearsal**: these are processors.")
    for device, outcomes in devices:
        about = hardware(device)
        memory = f"{human_bytes(about.memory_bytes)}, {about.driver or 'no driver told'}"
        lines += [
            "",
            f"## {device.adapter} {device.name}",
            "",
            f"{about.name}; {memory}; {runtime_version(device.adapter)}",
        ]
        for outcome in outcomes:
            lines += ["", f"### {outcome.title} ({outcome.took_s:.0f} s)", "", *outcome.lines]
            lines += ["", f"It {outcome.failure}"] if outcome.failure else []
    return _hide_places("\n".join(lines) + "\n")


def _hide_places(text: str) -> str:
    """Return a text without the directories that say whose machine it is."""
    for place, word in ((tempfile.gettempdir(), "TMP"), (str(Path.home()), "~"), (str(Path.cwd()), ".")):
        text = text.replace(place, word) if len(place) > 1 else text
    return text


def main() -> None:
    """Measure, and write the report after every part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--source", default=DEFAULT_MODEL, help="a GGUF file or a directory; else the default model")
    parser.add_argument("--only", action="append", default=[], metavar="RUNTIME:DEVICE", help="may be repeated")
    parser.add_argument("--part", action="append", choices=list(_SHARES), help="may be repeated; else all")
    parser.add_argument("--minutes", type=float, default=20.0)
    arguments = parser.parse_args()
    devices, missing = list_devices(arguments.only)
    if not devices:
        sys.exit("there is no such device; `outrider devices` lists those that are here")
    started, done = time.monotonic(), []
    for device in devices:
        outcomes: list[Outcome] = []
        done.append((device, outcomes))
        with tempfile.TemporaryDirectory(prefix="outrider-devices-") as work:
            for part in list_parts(device, arguments.source, Path(work)):
                if part.title not in (arguments.part or _SHARES):
                    continue
                limit_s = _SHARES[part.title] * arguments.minutes * 60.0 / len(devices)
                sys.stderr.write(f"{device.adapter} {device.name}: {part.title}, {limit_s:.0f} s at the most\n")
                with serve_vllm(arguments.source if part.title == "bench" else "", Path(work) / "vllm.log") as vllm:
                    named = [*part.command, *(["--endpoint", f"vllm={vllm}"] if vllm else [])]
                    outcomes.append(run_part(Part(part.title, named, part.read), limit_s))
                report = write_report(done, missing, arguments.source, time.monotonic() - started)
                arguments.report.write_text(report, encoding="utf-8")


if __name__ == "__main__":
    main()
