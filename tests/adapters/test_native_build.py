"""Kernels of llama.cpp that are built here: what of the sources is changed, and which library is found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest

from adapters.contract import AdapterUnavailable
from adapters.libllama import DISTRIBUTION, FORK_VARIABLE, find_build_directory, find_library, is_portable
from adapters.llama_cpp import native_build
from adapters.llama_cpp.native import IN_ANY_ROWS
from adapters.llama_cpp.native_build import EDITS, OUTDATED, build, digest_sources, edit_sources, is_outdated
from orchestrator.cli.doctor import _kernels
from tests.support.conformance import NO_FORK
from tests.support.daemon import outrider_process

LIBRARY = "libllama.so"


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    monkeypatch.delenv(FORK_VARIABLE, raising=False)
    return tmp_path


def write_sources(directory: Path, missing: int = 0) -> None:
    """Write files that have what is edited, once more before it, and once more behind it."""
    for file in {edit.file for edit in EDITS}:
        text = ""
        for begin, end in {(edit.begin, edit.end): None for edit in EDITS if edit.file == file}:
            edits = [edit for edit in EDITS if (edit.file, edit.begin, edit.end) == (file, begin, end)]
            around = "".join(f"{edit.old} outside\n" for edit in edits)
            body = "".join(f"{edit.old} {{ {n} }}\n" for edit in edits for n in range(edit.times - missing))
            text += f"{around}{begin}\n{body}{end}\n{around}"
        path = directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_what_is_edited_changes_and_nothing_else(tmp_path):
    write_sources(tmp_path / "before")
    write_sources(tmp_path / "after")
    edit_sources(tmp_path / "after")
    for file in {edit.file for edit in EDITS}:
        before, after = ((tmp_path / place / file).read_text() for place in ("before", "after"))
        for edit in (edit for edit in EDITS if edit.file == file):
            assert after.count(f"{edit.old} outside") == before.count(f"{edit.old} outside")
            assert after.count(f"{edit.new} {{") == edit.times


def test_a_header_lies_beside_each_file_that_reads_it(tmp_path):
    write_sources(tmp_path)
    edit_sources(tmp_path)
    named = [line.split('"')[1] for edit in EDITS for line in edit.new.splitlines() if line.startswith("#include")]
    assert len(named) == 4
    for name in named:
        assert (tmp_path / "ggml/src/iqk" / Path(name).name).read_text()


def test_sources_of_another_release_are_refused_before_anything_is_compiled(tmp_path):
    write_sources(tmp_path, missing=1)
    with pytest.raises(AdapterUnavailable, match="nothing was built"):
        edit_sources(tmp_path)


def test_an_archive_of_other_bytes_is_refused(prefix):
    archive = prefix / "ik_llama_cpp_python-0.1.5.tar.gz"
    archive.write_bytes(b"other")
    with pytest.raises(AdapterUnavailable, match="is not the source distribution of ik-llama-cpp-python"):
        build(archive, 1, print)


def test_what_lacks_is_named_with_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = outrider_process("build-kernels", "--source", str(tmp_path / "none.tar.gz"))
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "pip install cmake" in done.stderr or "install g++ or clang" in done.stderr


@NO_FORK
def test_what_was_built_here_goes_before_the_wheel_and_behind_what_the_operator_names(prefix, monkeypatch):
    wheel = find_library().version
    assert is_portable()
    built = find_build_directory() / LIBRARY
    built.parent.mkdir(parents=True)
    built.write_bytes(b"built")
    first = find_library().version
    built.write_bytes(b"built anew")
    os.utime(built, (1, 1))
    assert not is_portable()
    named = prefix / "named" / LIBRARY
    named.parent.mkdir()
    named.write_bytes(b"named")
    again = find_library().version
    monkeypatch.setenv(FORK_VARIABLE, str(named))
    assert len({wheel, first, again, find_library().version}) == 4, "their bits, classes and profiles are apart"


@NO_FORK
def test_a_library_of_other_kernels_goes_on_being_used_and_is_told_of(prefix, monkeypatch):
    """Those of the version before, of one that left no word of them, and of an edit that is changed."""
    assert not is_outdated(), "nothing was built here"
    built = find_build_directory() / LIBRARY
    built.parent.mkdir(parents=True)
    built.write_bytes(b"built")
    (check,) = _kernels()
    assert (check.verdict, check.found) == ("warn", OUTDATED)
    assert check.todo.startswith("outrider build-kernels")
    stamp = built.with_name("sources")
    stamp.write_text(digest_sources())
    assert [check.verdict for check in _kernels()] == ["ok"]
    digest_sources.cache_clear()
    monkeypatch.setattr(native_build, "EDITS", EDITS[1:])
    assert is_outdated()
    digest_sources.cache_clear()
    kernels = prefix / "kernels"
    shutil.copytree(native_build._KERNELS, kernels)
    monkeypatch.setattr(native_build, "EDITS", EDITS)
    monkeypatch.setattr(native_build, "_KERNELS", kernels)
    assert not is_outdated()
    digest_sources.cache_clear()
    (kernels / "joint_graphs.h").write_text("// changed")
    assert is_outdated()
    digest_sources.cache_clear()
    monkeypatch.setenv(FORK_VARIABLE, str(prefix / LIBRARY))
    assert not is_outdated(), "the operator's own is nobody's business"


@NO_FORK
def test_a_worker_names_an_outdated_library_and_the_way_out(tmp_path):
    """The wheel's library in the place of one that was built here, in an environment of its own."""
    venv.create(tmp_path / "environment", system_site_packages=True)
    python = str(tmp_path / "environment" / "bin" / "python")
    packages = Path(str(distribution(DISTRIBUTION).locate_file("")))
    paths = os.pathsep.join(path for path in sys.path if path)
    beside = str(packages / "ik_llama_cpp_python.libs")  # which the wheel's library finds by where it lies
    environment = {**os.environ, "PYTHONPATH": paths, "LD_LIBRARY_PATH": beside}
    ask = (
        "import shutil, sys; from adapters.libllama import find_build_directory as place;"
        "from adapters.llama_cpp.native_build import digest_sources; at = place(); at.mkdir(parents=True);"
        "shutil.copy2(sys.argv[1], at);"
        "sys.argv[2] and (at / 'sources').write_text(digest_sources());"
        "from adapters.llama_cpp.library import choose_library; print(choose_library().name); shutil.rmtree(at)"
    )
    for stamped in ("", "stamped"):
        command = [python, "-c", ask, str(packages / "ik_llama_cpp" / "lib" / LIBRARY), stamped]
        done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
        warning = f"{OUTDATED}: outrider build-kernels"
        assert (warning in done.stdout, warning in done.stderr) == (not stamped, not stamped)
        assert "built here" in done.stdout


@NO_FORK
@pytest.mark.slow
def test_a_build_of_this_machine_needs_no_padding(tmp_path):
    """In an environment of its own, as this one's library is loaded once."""
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", str(tmp_path)], check=True)
    python = str(tmp_path / "bin" / "python")
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths}
    subprocess.run([python, "-m", "orchestrator.cli.main", "build-kernels"], check=True, env=environment)
    ask = (
        "from adapters.llama_cpp.library import choose_library; from adapters.contract import Exactness;"
        "from adapters.llama_cpp.native_build import is_outdated;"
        "print(choose_library().list_classes('CPU', Exactness.BIT)[0], is_outdated())"
    )
    done = subprocess.run([python, "-c", ask], check=True, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == f"{[IN_ANY_ROWS]} False"
