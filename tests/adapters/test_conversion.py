"""A conversion that is ended goes on from what was finished, says how far it is, and needs little memory."""

from __future__ import annotations

import filecmp
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from adapters import registry
from adapters.artefact import NOTES, list_kept
from adapters.contract import ModelRefused, OutOfMemory, RuntimeFailed
from adapters.conversion_process import run_conversion
from adapters.decoder.from_gguf import GgufWeights
from adapters.decoder.spec import Tensor
from adapters.model_source import ModelSource
from adapters.model_store import ModelStore
from adapters.openvino_rt.adapter import OpenVinoAdapter
from adapters.store_usage import SourceUse, measure_store
from tests.support.first_layers import write_first_layers
from tests.support.waiting import until

_LAYERS = 12
"""Of the default model's 30: enough that a converter is in its midst for a while."""
_PARTS = 16
_PREPARES = """
import sys
from pathlib import Path
from adapters import registry
from adapters.model_source import ModelSource
from adapters.model_store import ModelStore
source = Path(sys.argv[1])
file = ModelSource(source, source.name, str(source))
ModelStore(Path(sys.argv[2])).prepare(file, registry.get(sys.argv[3]), lambda stage, fraction: None)
"""
_MEASURES = """
import sys
from pathlib import Path
import gguf.quants, numpy
from adapters import registry
from adapters.source_meter import SourceMeter
source, target, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
def ignore(*said): pass
if name == "openvino_rt":  # it has a process of its own for it
    import openvino, openvino.opset13
    from adapters.openvino_rt.convert import convert
    def prepare(): convert(source, target, SourceMeter(source, ignore))
else:
    if name == "onnx_rt":
        import onnx
    def prepare(): registry.get(name).prepare(source, target, ignore)
def peak_kib():
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0])
before = peak_kib()
prepare()
print((peak_kib() - before) * 1024)
"""

_ENDS = """
import sys
from adapters.conversion_process import end_conversion
def run():
    {program}
sys.exit(end_conversion(run))
"""


class Heard:
    """A Progress that keeps what it heard, and does something at some of it."""

    def __init__(self, then: Callable[[float], None] = lambda fraction: None) -> None:
        self.said: list[tuple[str, float]] = []
        self._then = then

    def __call__(self, stage: str, fraction: float) -> None:
        self.said.append((stage, fraction))
        self._then(fraction)

    @property
    def fractions(self) -> list[float]:
        return [fraction for stage, fraction in self.said if stage.startswith("convert") and " of " in stage]


@pytest.fixture(scope="module")
def source(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    path = write_first_layers(tmp_path_factory.mktemp("source") / "layers.gguf", default_model_path, _LAYERS)
    return ModelSource(path, "model", str(path))


@pytest.fixture(scope="module")
def undisturbed(source: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Heard]:
    return prepare_undisturbed(source, tmp_path_factory.mktemp("whole"), "openvino_rt")


def prepare_undisturbed(source: ModelSource, root: Path, adapter: str) -> tuple[Path, Heard]:
    heard = Heard()
    return ModelStore(root).prepare(source, registry.get(adapter), heard), heard


def count_finished(root: Path) -> int:
    return sum(max(0, len(path.read_text().splitlines()) - 1) for path in list_kept(root))


def find_converter(of: int) -> psutil.Process | None:
    children = psutil.Process(of).children(recursive=True)
    return next((child for child in children if "adapters.openvino_rt.convert" in child.cmdline()), None)


def end_converter(root: Path) -> None:
    until(lambda: count_finished(root) >= _PARTS)
    converter = find_converter(os.getpid())
    assert converter is not None
    converter.kill()


def interrupt(root: Path, source: ModelSource) -> None:
    """Begin to prepare, and kill the converter in the middle."""
    killer = threading.Thread(target=end_converter, args=(root,))
    killer.start()
    with pytest.raises(RuntimeFailed, match="SIGKILL"):
        ModelStore(root).prepare(source, OpenVinoAdapter(), Heard())
    killer.join()


def is_same(prepared: Path, expected: Path) -> bool:
    """Return whether all files hold the same bytes, but for the notes of when they were made."""
    names = [
        sorted(path.name for path in directory.iterdir() if path.name not in NOTES)
        for directory in (prepared, expected)
    ]
    return names[0] == names[1] and all(
        filecmp.cmp(prepared / name, expected / name, shallow=False) for name in names[0]
    )


def test_a_conversion_says_how_many_bytes_of_its_source_are_done(undisturbed: tuple[Path, Heard]) -> None:
    prepared, heard = undisturbed
    assert any(re.fullmatch(r"convert .*: [\d.]+ [KMG]iB of [\d.]+ MiB", stage) for stage, _ in heard.said)
    assert heard.fractions == sorted(heard.fractions)
    assert not list_kept(prepared.parent)


def test_a_killed_converter_is_no_fault_of_the_model_and_what_it_finished_is_kept(
    tmp_path: Path, source: ModelSource, undisturbed: tuple[Path, Heard]
) -> None:
    interrupt(tmp_path, source)
    prepared = go_on(tmp_path, source)
    assert is_same(prepared, undisturbed[0])
    assert [path.name for path in prepared.parent.iterdir() if path.name.startswith(".")] == []


def test_a_killed_worker_leaves_what_was_finished_to_the_next(
    tmp_path: Path, source: ModelSource, undisturbed: tuple[Path, Heard]
) -> None:
    worker = begin_worker(tmp_path, source, "openvino_rt")
    converter = find_converter(worker.pid)
    assert converter is not None
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    until(lambda: not converter.is_running() or converter.status() == psutil.STATUS_ZOMBIE)
    assert is_same(go_on(tmp_path, source), undisturbed[0])


@pytest.mark.parametrize("adapter", ["onnx_rt", "torch_device"])
def test_a_worker_that_is_killed_while_it_converts_leaves_what_was_finished_to_the_next(
    tmp_path: Path, source: ModelSource, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = begin_worker(tmp_path, source, adapter)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    kept = [json.loads(line) for path in list_kept(tmp_path) for line in path.read_text().splitlines()[1:]]
    layer = max(int(part["key"].partition(".")[0]) for part in kept if part["key"][0].isdigit())
    draft = list_kept(tmp_path)[0].parent
    read: list[str] = []

    def note(weights: GgufWeights, name: str) -> Tensor:
        read.append(name)
        return decode(weights, name)

    decode = GgufWeights.tensor
    monkeypatch.setattr(GgufWeights, "tensor", note)
    usage = measure_store(tmp_path, [SourceUse(source.source, "auto", draft.parent.name)])
    assert (usage.unused, usage.used_bytes > 0) == ((), True)
    prepared = ModelStore(tmp_path).prepare(source, registry.get(adapter), Heard())
    assert not [name for name in read if name[0].isdigit() and int(name.partition(".")[0]) < layer]
    assert not {part["key"] for part in kept}.intersection(read) - {"embedding"}  # which a tied head reads, too
    assert not list_kept(tmp_path)
    assert is_same(prepared, prepare_undisturbed(source, tmp_path / "other", adapter)[0])


def begin_worker(root: Path, source: ModelSource, adapter: str) -> subprocess.Popen[bytes]:
    """Begin to prepare in another process, and return it when some parts are finished."""
    worker = subprocess.Popen([sys.executable, "-c", _PREPARES, str(source.path), str(root), adapter])
    until(lambda: count_finished(root) >= _PARTS or worker.poll() is not None)
    assert worker.poll() is None
    return worker


def go_on(root: Path, source: ModelSource) -> Path:
    """Prepare, and see that nothing of what was finished is made again."""
    kept = list_kept(root)[0].read_text().splitlines()[: count_finished(root) + 1]
    assert len(kept) > _PARTS
    return ModelStore(root).prepare(source, OpenVinoAdapter(), Heard(lambda _fraction: assert_begins(root, kept)))


def assert_begins(root: Path, kept: list[str]) -> None:
    """What was finished stays at its place: nothing of it is made again."""
    for path in list_kept(root):
        assert path.read_text().splitlines()[: len(kept)] == kept


@pytest.mark.parametrize("harm", ["values", "torn line", "another source"])
def test_what_is_not_as_it_was_written_is_made_again(
    tmp_path: Path, source: ModelSource, undisturbed: tuple[Path, Heard], harm: str
) -> None:
    interrupt(tmp_path, source)
    journal = list_kept(tmp_path)[0]
    lines = journal.read_text().splitlines()
    if harm == "values":
        place = json.loads(lines[3])["blocks"][0]
        with journal.with_suffix(".bin").open("r+b") as file:
            file.seek(place["offset"] + place["size"] // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
    elif harm == "torn line":
        journal.write_text("\n".join([*lines[:-1], lines[-1][:20]]))
    else:
        journal.write_text("\n".join(["[[1, 2, 3]]", *lines[1:]]) + "\n")
    assert is_same(ModelStore(tmp_path).prepare(source, OpenVinoAdapter(), Heard()), undisturbed[0])


@pytest.mark.parametrize("adapter", ["openvino_rt", "onnx_rt", "torch_device"])
def test_a_conversion_needs_less_memory_than_one_and_a_half_times_its_file(
    tmp_path: Path, default_model_path: Path, adapter: str
) -> None:
    command = [sys.executable, "-c", _MEASURES, str(default_model_path), str(tmp_path), adapter]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) < 1.5 * default_model_path.stat().st_size


@pytest.mark.parametrize(
    ("program", "raised"),
    [
        ("import sys; sys.exit('it is no model')", ModelRefused),
        ("import os; os.kill(os.getpid(), 9)", RuntimeFailed),
        ("import os; os.kill(os.getpid(), 11)", ModelRefused),
        ("raise OSError(28, 'full')", OSError),
        ("raise MemoryError", OutOfMemory),
    ],
)
def test_how_a_converter_ended_says_whose_fault_it_is(program: str, raised: type[Exception]) -> None:
    with pytest.raises(raised):
        run_conversion([sys.executable, "-c", _ENDS.format(program=program)], "a model", Heard())
