"""The check of constants: which numbers have to say more, and that the decisions they name are there."""

import subprocess
import sys

import pytest

from tools import check_constants
from tools.check_constants import find_bare_numbers, find_missing_decisions


@pytest.mark.parametrize(
    "line",
    [
        "_MARGIN = 1.35",
        "LEAST: Final = 0.0",
        "ROWS = 2",
        "BYTES = 64 * 1024",
        "WIDTHS = (1, 2, 4)",
        "UP, DOWN = 2.0, 1.0",
        "SELDOM = Probe(16)",
        'RATES = {"cpu": 20.0 * GB}',
        "HALF = WHOLE // 2",
    ],
)
def test_a_tuned_number_says_what_it_is_worth(line):
    name = line.split(" ")[0].strip(",:")
    assert list(find_bare_numbers(f"import os\n\n{line}\n")) == [(3, name)]
    assert not list(find_bare_numbers(f"import os\n\n# ADR 0029: ...\n{line}\n"))
    assert not list(find_bare_numbers(f"{line}  # of a round\n"))
    assert not list(find_bare_numbers(f'{line}\n"""Of a round."""\n'))


@pytest.mark.parametrize(
    "line",
    [
        "NONE = -1",
        "ON = True",
        "FIRST, NEXT = 0, 1",
        'NAME = "x" * 20',
        "rows = 3",
        "SIZES = len(WIDTHS) + 1",
        "_FORMAT = 2",
    ],
)
def test_what_is_not_tuned_needs_no_word(line):
    assert not list(find_bare_numbers(line))


def test_a_comment_is_one_constants_alone():
    assert list(find_bare_numbers("# Why.\nUP = 2.0\nDOWN = 3.0\n")) == [(3, "DOWN")]


def test_decisions_that_are_named_are_there():
    text = "# By ADR 0029, 0031 and 0042 (docs/adr/0007-x.md), and ADR\n# 0099.\n"
    assert find_missing_decisions(text, frozenset({"0029", "0031", "0042", "0007", "0099"})) == []
    assert find_missing_decisions(text, frozenset({"0029"})) == ["0007", "0031", "0042", "0099"]


def test_the_check_fails_with_the_place(tmp_path):
    (tmp_path / "docs/adr").mkdir(parents=True)
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies/part.py").write_text("_MARGIN = 1.35\n# ADR 0001: why.\n_SHARE = 0.5\n", encoding="utf-8")
    command = [sys.executable, check_constants.__file__, "--root", tmp_path]
    end = subprocess.run(command, capture_output=True, text=True, check=False)
    assert end.returncode == 1
    assert "policies/part.py:1: _MARGIN" in end.stdout
    assert "policies/part.py: names ADR 0001" in end.stdout
    (tmp_path / "policies/part.py").write_text("# Not tuned: 1.2 to 1.5 does.\n_MARGIN = 1.35\n", encoding="utf-8")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
