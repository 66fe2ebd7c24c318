"""docs/models.md says what the tests load."""

from __future__ import annotations

from tests.support.model_rows import ROWS
from tests.support.models_page import PAGE, write_models_page


def test_the_page_of_models_is_what_the_tests_load() -> None:
    written = write_models_page()
    assert ROWS
    same = PAGE.read_text(encoding="utf-8") == written
    assert same, "docs/models.md is out of date: python -m tests.support.models_page"
