"""Names of spans, attributes and metrics: those of the conventions, and those of the documentation."""

from __future__ import annotations

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, http_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from opentelemetry.semconv.attributes import error_attributes

from orchestrator.daemon.tracing import names
from tools.write_trace_names import PAGE, fill_page


def values_of(module: object) -> set[str]:
    return {value for value in vars(module).values() if isinstance(value, str)}


def test_the_page_has_every_name():
    text = PAGE.read_text(encoding="utf-8")
    assert fill_page(text) == text, "run: PYTHONPATH=. python -m tools.write_trace_names"


def test_names_that_are_not_our_own_are_those_of_the_conventions():
    known = values_of(gen_ai_attributes) | values_of(http_attributes) | values_of(error_attributes)
    foreign = {name for name, *_ in names.ATTRIBUTES if not name.startswith("outrider.")}
    assert len(foreign) > 10
    assert foreign <= known
    assert {name for name, *_ in names.METRICS} <= values_of(gen_ai_metrics)
    operations = {one.value for one in gen_ai_attributes.GenAiOperationNameValues}
    assert set(names.OPERATIONS.values()) <= operations


def test_attributes_belong_to_spans_that_there_are():
    spans = {name for name, *_ in names.SPANS}
    assert {span for _, of, _ in names.ATTRIBUTES for span in of} == spans
    assert {parent for _, parent, _ in names.SPANS} - {""} <= spans
    assert len({name for name, *_ in names.ATTRIBUTES}) == len(names.ATTRIBUTES)
