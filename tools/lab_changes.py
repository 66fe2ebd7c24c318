"""Tells `make check` whether the laboratory's tests may be left out: nothing that they depend on has changed.

They depend on the laboratory, on what decides in its replays and simulations, and on each module that its files import
by name. The base of the comparison is the commit over which they last passed here. Without one it is the last commit
that this branch shares with `origin/main`, all of which were checked before they landed. The tests run wherever the
answer is not certain: a file that is not committed, a shallow clone, no base, no git.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = Path(".venv/.lab-checked")
LAB = "tools/lab"
DEPENDS_ON = (
    LAB,
    "policies",
    "device_profiles",
    "orchestrator/daemon/control",
    "orchestrator/worker/engine",
    "adapters/simulated",
    "conftest.py",
    "constraints.txt",
    "pyproject.toml",
    "tools/lab_changes.py",
)
_PACKAGES = ("adapters", "device_profiles", "orchestrator", "policies", "tests")


class UncertainError(Exception):
    """Nobody can say what has changed; the text says why."""


def main() -> int:
    """Exit with 0 where the tests may be left out, and say in one line why or why not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--commit", action="store_true", help="print the commit that the tests are about to be run over"
    )
    if parser.parse_args().commit:
        print(read_commit(ROOT))
        return 0
    try:
        base = find_base(ROOT)
        changes = list_changes(ROOT, base)
    except UncertainError as reason:
        print(f"the laboratory's tests run: {reason}")
        return 1
    if changes:
        print(f"the laboratory's tests run: {changes[0]} has changed since {base[:12]}, and {len(changes) - 1} more")
        return 1
    print(f"the laboratory's tests are skipped: nothing that they depend on has changed since {base[:12]}")
    return 0


def read_commit(root: Path) -> str:
    """Return the commit whose files these are; "" where that is not certain."""
    try:
        _require_clean(root)
        return _run_git(root, "rev-parse", "HEAD")
    except UncertainError:
        return ""


def find_base(root: Path) -> str:
    """Return a commit over which the tests have passed. Raises UncertainError where none is known."""
    _require_clean(root)
    record = root / RECORD
    if record.is_file() and (base := record.read_text(encoding="utf-8").strip()):
        return base
    if _run_git(root, "rev-parse", "--is-shallow-repository") != "false":
        raise UncertainError("this clone is shallow")
    base = _run_git(root, "merge-base", "HEAD", "origin/main")
    if base == _run_git(root, "rev-parse", "HEAD"):
        raise UncertainError("origin/main has this commit already, and nothing tells what was checked before")
    return base


def list_changes(root: Path, base: str) -> list[str]:
    """Return the files that differ from a commit's and that the tests depend on. Raises UncertainError."""
    inputs = [*DEPENDS_ON, *sorted(set(list_imported_files(root)))]
    differing = _run_git(root, "diff", "--name-only", "--no-renames", base, "--").splitlines()
    return [path for path in differing if any(path == place or path.startswith(f"{place}/") for place in inputs)]


def list_imported_files(root: Path) -> Iterator[str]:
    """Yield each file of the product or its tests that a file of the laboratory imports by name."""
    for source in (root / LAB).rglob("*.py"):
        for name in _list_imports(ast.parse(source.read_text(encoding="utf-8"))):
            if name.partition(".")[0] in _PACKAGES:
                path = name.replace(".", "/")
                yield f"{path}.py"
                yield f"{path}/__init__.py"


def _list_imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _require_clean(root: Path) -> None:
    if _run_git(root, "status", "--porcelain"):
        raise UncertainError("files here are not committed")


def _run_git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UncertainError(f"git does not run: {error}") from None
    if done.returncode:
        reason = done.stderr.strip().partition("\n")[0] or f"it ended with {done.returncode}"
        raise UncertainError(f"git {arguments[0]}: {reason}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
