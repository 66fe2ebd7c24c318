"""The check of the project's words: which names it counts, and that their limits only fall."""

import ast
from collections import Counter

from tools.check_words import (
    compare_names,
    count_names,
    find_past_forms,
    is_past_form,
    list_bindings,
    read_limits,
)

SOURCE = """
class Door:
    found: int = 0

    def describe(self, told, *, asked=None):
        self._begun = [one for one in told]
        with open(asked) as there:
            return there.said

    @property
    def value(self):
        return self.found
"""


def test_each_binding_counts_once_and_no_use_does():
    names = Counter(name.strip("_") for name in list_bindings(ast.parse(SOURCE)))
    assert {"found": 1, "told": 1, "asked": 1, "begun": 1, "one": 1, "there": 1, "Door": 1}.items() <= names.items()
    assert names["said"] == 0


def test_names_are_counted_by_what_ships_and_what_stands_beside_it(tmp_path):
    for room in ("adapters", "tests"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "part.py").write_text(SOURCE * 9, encoding="utf-8")
    counts = count_names(tmp_path)
    assert counts["bindings"] == counts["bindings beside"]
    assert counts["bindings"]["found"] == 9
    assert counts["words"] == {"door": 9}
    assert counts["methods"] == {"describe": 9}


def test_a_count_may_fall_and_never_rise():
    limits = read_limits("bindings: one 100 found 10\nmethods: add 9")
    exact = {"bindings": Counter(one=100, found=10), "methods": Counter(add=9)}
    assert compare_names(exact, limits) == ([], [])
    above, loose = compare_names({"bindings": Counter(one=101, told=1), "methods": Counter(add=9, find=9)}, limits)
    assert [line.split("`")[1] for line in above] == ["one", "told", "find"]
    assert [line.split("`")[1] for line in loose] == ["found"]
    assert compare_names({"bindings": Counter(one=96, found=10), "methods": Counter(add=9)}, limits) == ([], [])


def test_past_forms_are_functions_only_that_are_no_property():
    assert is_past_form("_known_workers")
    assert not is_past_form("feed_tokens")
    tree = ast.parse("class Replica:\n    @property\n    def held(self): ...\n    def kept(self): ...\n")
    assert [finding.text for finding in find_past_forms(tree, "part.py")] == ["kept"]
