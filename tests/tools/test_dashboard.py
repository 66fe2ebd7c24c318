"""The dashboard that is checked in is the one that the metrics make, and asks for metrics that there are."""

from __future__ import annotations

import json
import re

from tools.make_dashboard import FILE, list_metrics, list_queries, make_dashboard


def test_making_it_again_gives_the_same():
    assert FILE.read_text(encoding="utf-8") == make_dashboard()


def test_it_asks_for_every_metric_and_for_none_that_there_is_not():
    there = {family.name for family in list_metrics()}
    names = {
        re.sub(r"_(total|bucket)$", "", name) if re.sub(r"_(total|bucket)$", "", name) in there else name
        for query in list_queries(json.loads(FILE.read_text(encoding="utf-8")))
        for name in re.findall(r"\boutrider_\w+", query)
    }
    assert names == there
