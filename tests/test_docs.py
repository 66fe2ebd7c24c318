"""Pages name files, functions and sections that are there, and every decision says whether it stands."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DECISIONS = sorted((DOCS / "adr").glob("0*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("**/*.md"))]
ROOMS = ("adapters", "device_profiles", "docs", "orchestrator", "packaging", "policies", "tests", "tools")
PACKAGES = ("adapters.", "device_profiles.", "orchestrator.", "outrider_lab.", "policies.", "tests.", "tools.")

# mkdocs checks docs/
OUTSIDE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "tools" / "lab" / "README.md"]

_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
_QUOTED = re.compile(r"`([\w./*-]+)`")
_HEAD = re.compile(r"(?m)^(\|.*\|)\n(\|(?: *:?-+:? *\|)+)$")
_STATUS = re.compile(r"(?m)^Status: (accepted|withdrawn|superseded by \[\d{4}\]\((\d{4}-[\w-]+\.md)\))[.,]")


def list_places() -> dict[str, set[str]]:
    """Return the files and directories of the repository, by every ending of their paths that begins behind a `/`."""
    places: dict[str, set[str]] = defaultdict(set)
    for room in ROOMS:
        for directory, names, files in os.walk(ROOT / room):
            names[:] = [name for name in names if name != "__pycache__"]
            for place in [Path(directory), *(Path(directory, name) for name in files)]:
                parts = place.relative_to(ROOT).parts
                for start in range(len(parts)):
                    places["/".join(parts[start:])].add("/".join(parts))
    return places


PLACES = list_places()
FOLDERS = {part for place in PLACES for part in place.split("/")[:-1]}


def resolve(quoted: str) -> set[str]:
    """Return the places that a quoted path may mean: the one of just that path, else all whose paths end so."""
    key = quoted.rstrip("/")
    for exact in (key, f"orchestrator/{key}"):
        if exact in PLACES[key]:
            return {exact}
    return PLACES[key]


def is_path(quoted: str) -> bool:
    """Tell whether a quoted text names a place in the repository, and not a media type or a file of a model."""
    first, slash, _ = quoted.partition("/")
    return quoted.endswith(".py") or (bool(slash) and first in FOLDERS)


def is_there(path: str) -> bool:
    """Tell whether a quoted path is that of one place. A bare name may be that of several: its row says which."""
    if "*" in path:
        return any(ROOT.glob(path)) or any(ROOT.glob(f"*/{path}"))
    places = resolve(path)
    return len(places) == 1 or ("/" not in path.rstrip("/") and bool(places))


def is_dead(quoted: str) -> bool:
    """Tell whether a quoted text names a place of the repository that is not there, or that is not clear."""
    if quoted.startswith(PACKAGES):  # a module, or a name in one
        path = quoted.replace(".", "/")
        return not any(map(resolve, (path, f"{path}.py", f"{path.rpartition('/')[0]}.py")))
    return is_path(quoted) and not is_there(quoted)


def find_dead(text: str) -> list[str]:
    """Return the dead paths that a page quotes, each with its line."""
    lines = enumerate(text.splitlines(), start=1)
    return [f"line {number}: {quoted}" for number, line in lines for quoted in _QUOTED.findall(line) if is_dead(quoted)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_paths_are_there(page: Path) -> None:
    assert find_dead(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "quoted",
    ["orchestrator/no_such.py", "control/reconcile.py", "pairing.py", "replay/__init__.py", "policies.acceptance"],
)
def test_a_path_that_is_not_there_or_not_clear_is_refused(quoted: str) -> None:
    assert find_dead(f"first\nsee `{quoted}`") == [f"line 2: {quoted}"]


@pytest.mark.parametrize(
    "quoted", ["text/event-stream", "config.json", "engine/loop.py", "orchestrator.cli.entry", "HOST/DEVICE"]
)
def test_what_is_there_or_no_path_is_taken(quoted: str) -> None:
    assert find_dead(f"`{quoted}`") == []


def find_missing_tests(text: str) -> list[str]:
    """Return the tests that a text quotes as `FILE.py::NAME` and that are not there."""
    missing = []
    for path, name in _TEST.findall(text):
        places = resolve(path)
        sources = [(ROOT / place).read_text(encoding="utf-8") for place in places]
        if len(places) != 1 or not re.search(rf"(?m)^(?:async )?def {name}\(", sources[0]):
            missing.append(f"{path}::{name}")
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tests_that_pages_name_are_there(page: Path) -> None:
    assert find_missing_tests(page.read_text(encoding="utf-8")) == []


def test_a_test_that_is_not_there_is_found() -> None:
    text = (
        "`tests/test_docs.py::test_paths_are_there`, `test_docs.py::test_nothing`, `test_no.py::test_paths_are_there`"
    )
    assert find_missing_tests(text) == ["test_docs.py::test_nothing", "test_no.py::test_paths_are_there"]


def test_every_claim_about_gpus_has_the_name_of_a_test() -> None:
    text = (DOCS / "gpus.md").read_text(encoding="utf-8")
    section = text.partition("## What is proven")[2].partition("## ")[0]
    header, _, *rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in header[1:]] == ["proven on hardware", "proven by a stand-in", "not offered"]
    assert len(rows) > 10
    for what, *claims in rows:
        assert any(claim.strip() for claim in claims), what
        assert all(_TEST.search(claim) for claim in claims if claim.strip()), what


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_table_has_as_many_columns_as_its_head(page: Path) -> None:
    heads = _HEAD.findall(page.read_text(encoding="utf-8"))  # one that has not is no table to a reader
    assert [head for head, rule in heads if head.replace("\\|", "").count("|") != rule.count("|")] == []


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_says_whether_it_stands(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    status = _STATUS.match(lines[2])
    assert status is not None, "the third line is `Status: accepted.`, `withdrawn.` or `superseded by [N](page), ...`"
    successor = status[2]
    assert successor is None or (page.parent / successor).exists()


def test_every_decision_is_listed() -> None:
    listed = re.findall(r"\((\d{4}-[\w-]+\.md)\)", (DOCS / "adr" / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == [page.name for page in DECISIONS]


STEPS = re.findall(r"(?m)^\| (\d+) \| .* \| (.*) \| (.*) \|$", (DOCS / "start-here.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("number", "functions", "files"), STEPS)
def test_a_step_of_a_request_names_functions_of_its_files(number: str, functions: str, files: str) -> None:
    sources = [(ROOT / place).read_text(encoding="utf-8") for path in _QUOTED.findall(files) for place in resolve(path)]
    defined = {name for source in sources for name in re.findall(r"(?m)^ *(?:async )?(?:def|class) (\w+)", source)}
    named = {part for function in _QUOTED.findall(functions) for part in function.split(".")}
    assert named
    assert named <= defined, f"step {number}"


def test_a_newcomer_can_read_it_all() -> None:
    assert len(STEPS) == 10
    assert len((DOCS / "architecture.md").read_text(encoding="utf-8").splitlines()) <= 250


def list_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda page: page.parent.name + "/" + page.name)
def test_links_outside_the_site_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8"))
    assert links
    for path, anchor in links:
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in list_anchors(target), f"{path}#{anchor}"
