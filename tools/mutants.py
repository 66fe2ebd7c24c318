"""Do the tests see a fault? A sample of mutants of the source, each run against the tests that can reach it.

    python -m tools.mutants --json OUT [--number 160] [--seed 1] [--tests-from CHECKOUT]
    python -m tools.mutants --json OUT --again EARLIER --outcome survived [--directories tests/engine tests/api]

Cosmic Ray makes the mutants. A seed and a source give the same mutants in the same order, whatever the tests are.
Each runs in a copy of the checkout. `--tests-from` takes the tests, and their settings, of another checkout.
A run that was stopped goes on where it was, if it is asked for again.
A timeout, and a kill where tests depend on time, count if the test fails twice, and passes without the mutant.
The other tests that killed run once more at the end, without mutants: a kill by one that fails is `doubtful`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import grimp
import pytest

from tools.mutant_sample import ROOT, Mutant, draw_mutants, identify, make_source

GOLDEN = "tools/lab/tests/golden"
REACH = {
    "policies": ("tests/policies", GOLDEN, "tests/planning"),
    "orchestrator/worker/engine": (GOLDEN, "tests/engine"),
    "orchestrator/worker/drafting": ("tests/drafting", GOLDEN, "tests/engine"),
    "orchestrator/launch": ("tests/workers",),
    "orchestrator/protocol": ("tests/workers", "tests/control"),
    "orchestrator/daemon/control": ("tests/control",),
}
"""A package, and the directories of tests that can reach it: those without worker processes first."""
SURE = ("tests/policies/", f"{GOLDEN}/", "tests/planning/", "exit status")
"""Where a failure does not depend on time."""
REAL_MODELS = ("default_model", "draft_outputs", "draft_pairs", "quality", "quantised")
"""In names of files whose tests compute with models on the runtimes: too slow to run for each mutant."""
LIBRARIES = ("fastapi", "hypothesis.strategies", "openai", "prometheus_client", "scipy.stats", "uvicorn")
"""Loaded once: to load them takes as long as many a test that kills."""
TEST_TIMEOUT_S, RUN_TIMEOUT_S = 45, 600


def run_pytest(place: Path, output_path: str, arguments: Sequence[str]) -> None:
    """Run pytest in this process, which has the libraries already but nothing of the program."""
    os.setsid()
    with open(output_path, "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.chdir(place)
    os.environ |= {"PYTHONPATH": str(place), "PYTHONHASHSEED": "0"}
    sys.path[:] = [str(place), *(path for path in sys.path if path not in ("", str(ROOT)))]
    plugins = (f"-p{name}" for name in ("pytest_asyncio.plugin", "pytest_timeout", "_hypothesis_pytestplugin"))
    options = ("-q", "-pno:cacheprovider", f"--timeout={TEST_TIMEOUT_S}", "--hypothesis-seed=0")
    sys.exit(pytest.main(["--disable-plugin-autoload", *plugins, *options, *arguments]))


class Copy:
    """A copy of the checkout, in which mutants live."""

    def __init__(self, place: Path, tests_from: Path) -> None:
        left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "tests")
        shutil.copytree(ROOT, place, ignore=left_out)
        for tests in ("tests", "tools/lab/tests"):
            shutil.copytree(tests_from / tests, place / tests, ignore=left_out)
        for name in ("pyproject.toml", "conftest.py"):
            shutil.copy2(tests_from / name, place)
        self.place = place
        self.graph = grimp.build_graph(
            "orchestrator", "policies", "adapters", "device_profiles", "outrider_lab", cache_dir=None
        )

    @lru_cache  # noqa: B019
    def find_imports(self, path: Path) -> frozenset[str]:
        """Return the names of the modules that a file of the tests imports, through the helpers too."""
        imports = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imports |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imports |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        helpers = (
            self.place / f"{name.replace('.', '/')}.py"
            for name in imports
            if name.startswith(("tests.", "tools.lab.tests."))
        )
        near = (at for at in (*helpers, path.with_name("conftest.py")) if at.is_file() and at != path)
        return frozenset(imports).union(*map(self.find_imports, near))

    def find_tests(self, module: str, directories: Sequence[str]) -> list[list[str]]:
        """Return the files of tests that can reach a module: those that name it, then the rest."""
        name = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        reached = {name, *self.graph.find_downstream_modules(name)}
        paths = [path for at in directories for path in sorted((self.place / at).rglob("test_*.py"))]
        paths = [path for path in paths if not any(word in path.name for word in REAL_MODELS)]
        if module.startswith("policies/"):  # the rest of the program may reach a module through another process
            paths = [path for path in paths if self.find_imports(path) & reached]
        paths.sort(key=lambda path: "scipy" in "".join(self.find_imports(path)))  # statistics take long
        near = [path for path in paths if name in self.find_imports(path) or Path(module).stem in path.stem]
        rest = [path for path in paths if path not in near]
        return [[str(path.relative_to(self.place)) for path in part] for part in (near, rest) if part]

    def run(self, tests: Sequence[str], *options: str) -> tuple[str, list[str]]:
        shutil.rmtree(self.place / ".hypothesis", ignore_errors=True)
        with tempfile.NamedTemporaryFile("w+") as log:
            process = get_context("fork").Process(target=run_pytest, args=(self.place, log.name, [*options, *tests]))
            process.start()
            process.join(RUN_TIMEOUT_S)
            code = process.exitcode
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
            output = log.read()
        failed = re.findall(r"^(?:FAILED|ERROR) ((?:tools/lab/)?tests/.+?)(?: - .*)?$", output, re.MULTILINE)
        if code is None or (failed and "from pytest-timeout" in output):
            return "timeout", failed
        if code in (0, 5):  # passed, or nothing left to run
            return "survived", []
        return "killed", failed or [f"exit status {code}"]

    @contextmanager
    def change(self, module: str, source: str) -> Iterator[None]:
        path = self.place / module
        path.write_text(source, encoding="utf-8")
        try:
            yield
        finally:
            shutil.copy2(ROOT / module, path)  # with its time, by which Python knows what it has compiled

    def fail_tests(self, module: str, source: str, tests: Sequence[str]) -> tuple[str, list[str]]:
        """Return how tests take another source; what depends on time must fail twice, and pass without it."""
        left_out: list[str] = []
        while True:
            with self.change(module, source):
                outcome, failed = self.run(tests, "-x", *(f"--deselect={test}" for test in left_out))
                if not failed or (outcome == "killed" and failed[0].startswith(SURE)):
                    return outcome, failed
                fails_again = self.run(failed)[0] != "survived"
            if fails_again and self.run(failed)[0] == "survived":
                return outcome, failed
            left_out += failed

    def judge(self, mutant: Mutant, directories: Sequence[str]) -> Mutant:
        start, source, outcome, failed = time.monotonic(), make_source(mutant) or "", "survived", list[str]()
        for tests in self.find_tests(mutant["module"], directories):
            if outcome == "survived":
                outcome, failed = self.fail_tests(mutant["module"], source, tests)
        seconds = round(time.monotonic() - start, 1)
        return mutant | {"outcome": outcome, "killed_by": failed[0] if failed else None, "seconds": seconds}


def package_of(mutant: Mutant) -> str:
    return next(package for package in REACH if mutant["module"].startswith(f"{package}/"))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="a line for each mutant, written as it is known")
    parser.add_argument("--number", type=int, default=160)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tests-from", type=Path, default=ROOT, help="a checkout whose tests and settings are used")
    parser.add_argument("--again", type=Path, help="the mutants of an earlier run, in place of new ones")
    parser.add_argument("--outcome", help="of those, the ones that ended so")
    parser.add_argument("--directories", nargs="+", help="directories of tests, in place of the usual ones")
    arguments = parser.parse_args()
    if arguments.again:
        earlier = [json.loads(line) for line in arguments.again.read_text(encoding="utf-8").splitlines()]
        mutants = [mutant for mutant in earlier if arguments.outcome in (None, mutant["outcome"])]
    else:
        mutants = draw_mutants(REACH, arguments.number, arguments.seed)
    for library in LIBRARIES:
        import_module(library)
    ended = [json.loads(line) for line in arguments.json.read_text().splitlines()] if arguments.json.exists() else []
    known = [identify(mutant) for mutant in ended]
    with tempfile.TemporaryDirectory() as place, arguments.json.open("a", encoding="utf-8") as out:
        copy = Copy(Path(place) / "copy", arguments.tests_from)
        for mutant in (mutant for mutant in mutants if identify(mutant) not in known):
            ended.append(copy.judge(mutant, arguments.directories or REACH[package_of(mutant)]))
            print(json.dumps(ended[-1], ensure_ascii=False), file=out, flush=True)
        killers = {test for mutant in ended if "::" in (test := mutant["killed_by"] or "") and test.startswith(SURE)}
        _, failing = copy.run(sorted(killers)) if killers else ("", [])
    for mutant in ended:
        if mutant["killed_by"] in failing:
            mutant["outcome"] = "doubtful"
    arguments.json.write_text(
        "".join(json.dumps(mutant, ensure_ascii=False) + "\n" for mutant in ended), encoding="utf-8"
    )
    for (package, outcome), number in sorted(
        Counter((package_of(mutant), mutant["outcome"]) for mutant in ended).items()
    ):
        print(f"{package:24} {outcome:8} {number:4}")


if __name__ == "__main__":
    main()
