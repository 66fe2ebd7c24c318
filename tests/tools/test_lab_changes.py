"""The laboratory's tests are left out only where nothing that they depend on differs from what has passed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import lab_changes


def run_git(directory: Path, *arguments: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *who, *arguments], cwd=directory, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def write(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def commit(root: Path, path: str, text: str) -> None:
    write(root, path, text)
    run_git(root, "add", ".")
    run_git(root, "commit", "--quiet", "--message", path)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone of a repository with a laboratory, on a branch of its own."""
    origin = tmp_path / "origin"
    origin.mkdir()
    run_git(origin, "init", "--quiet")
    write(origin, ".gitignore", ".venv\n")
    write(origin, "orchestrator/config/load.py")
    write(origin, "orchestrator/daemon/api.py")
    commit(origin, "tools/lab/src/bench.py", "from orchestrator.config import load\n")
    clone = tmp_path / "clone"
    run_git(tmp_path, "clone", "--quiet", str(origin), str(clone))
    monkeypatch.setattr(lab_changes, "ROOT", clone)
    monkeypatch.setattr("sys.argv", ["lab_changes"])
    return clone


def is_skipped(capsys: pytest.CaptureFixture[str], reason: str) -> bool:
    code = lab_changes.main()
    line = capsys.readouterr().out
    assert reason in line
    assert line.count("\n") == 1
    return code == 0


@pytest.mark.parametrize(
    "path", ["tools/lab/tests/a.py", "policies/b.py", "orchestrator/config/load.py", "conftest.py"]
)
def test_what_the_tests_depend_on_is_tested_though_another_commit_follows(root: Path, capsys, path: str):
    commit(root, path, "1")
    commit(root, "docs/page.md", "1")
    assert not is_skipped(capsys, f"{path} has changed since")


def test_what_they_do_not_depend_on_is_no_reason(root: Path, capsys):
    commit(root, "docs/page.md", "1")
    commit(root, "orchestrator/daemon/api.py", "1")
    assert is_skipped(capsys, "nothing that they depend on has changed since")


def test_a_file_that_is_moved_away_is_a_change(root: Path, capsys):
    run_git(root, "mv", "orchestrator/config/load.py", "orchestrator/config/read.py")
    commit(root, "docs/page.md", "1")
    assert not is_skipped(capsys, "orchestrator/config/load.py has changed")


def test_the_commit_over_which_they_passed_is_the_base(root: Path, capsys):
    commit(root, "policies/b.py", "1")
    record = root / lab_changes.RECORD
    write(root, str(lab_changes.RECORD), lab_changes.read_commit(root))
    assert is_skipped(capsys, f"has changed since {record.read_text()[:12]}")
    commit(root, "policies/b.py", "2")
    assert not is_skipped(capsys, "policies/b.py has changed")
    record.write_text("0" * 40)
    assert not is_skipped(capsys, "git diff: ")


def test_they_run_where_nothing_is_certain(root: Path, tmp_path: Path, monkeypatch, capsys):
    assert not is_skipped(capsys, "origin/main has this commit already")
    commit(root, "docs/page.md", "1")
    write(root, "docs/new.md")
    assert not is_skipped(capsys, "files here are not committed")
    assert lab_changes.read_commit(root) == ""
    (root / "docs/new.md").unlink()
    run_git(root, "remote", "remove", "origin")
    assert not is_skipped(capsys, "git merge-base: ")
    run_git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{root}", "shallow")
    monkeypatch.setattr(lab_changes, "ROOT", tmp_path / "shallow")
    assert not is_skipped(capsys, "this clone is shallow")
    (tmp_path / "plain").mkdir()
    monkeypatch.setattr(lab_changes, "ROOT", tmp_path / "plain")
    assert not is_skipped(capsys, "git status: ")
    monkeypatch.setenv("PATH", "")
    assert not is_skipped(capsys, "git does not run")


def test_each_place_that_they_depend_on_is_there():
    assert [place for place in lab_changes.DEPENDS_ON if not (lab_changes.ROOT / place).exists()] == []
    files = [
        path for path in set(lab_changes.list_imported_files(lab_changes.ROOT)) if (lab_changes.ROOT / path).exists()
    ]
    assert {"orchestrator/config/load.py", "tests/support/daemon.py"} <= set(files)
