"""pydantic's findings in the words of someone who edits cluster.yaml: the key, what is wrong, the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from orchestrator.config.drafts import DRAFTS, METHODS, EndpointDraft, ModelDraft
from orchestrator.config.further_target import OWN_KEYS, FurtherTarget, find_first_place
from orchestrator.config.model import ClusterConfig
from orchestrator.config.source_text import Lines, Place, find_line, format_place, format_value
from orchestrator.config.target import (
    BOUNDED,
    COUNTED,
    PLACED,
    PLANNED,
    ReplicaBounds,
    ReplicaTarget,
    Target,
)

_KINDS = {
    "int_type": "must be an integer",
    "int_parsing_size": "must be an integer",
    "float_type": "must be a number",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "model_type": "must be a mapping of keys to values",
    "model_attributes_type": "must be a mapping of keys to values",
    "bool_type": "must be true or false",
}
_WRITTEN = (COUNTED, PLACED, BOUNDED, PLANNED)  # how replicas are, in pydantic's places
_NEAR = 0.6  # similar by difflib: fewer letters than that in common are chance
_SURELY_MEANT = 0.85  # both of two are named
_TAG_ERRORS = ("union_tag_invalid", "union_tag_not_found")
_RANGE_ERRORS = ("greater_than_equal", "less_than_equal")


def problems(error: ValidationError, path: Path, lines: Lines, root: type[BaseModel] = ClusterConfig) -> str:
    """Return one line a problem: the file, the line, and what is described."""
    # By line; within one line a mistyped key goes before the key that is therefore missing.
    ordered = sorted(
        (find_line(lines, place_of(detail)), detail["type"] == "missing", describe_error(detail, root))
        for detail in _own(error)
    )
    return "\n".join(f"{path}:{line}: {message}" for line, _, message in ordered)


def _own(error: ValidationError) -> list[ErrorDetails]:
    """Return what is wrong, without lists that are only too short because an item in them is wrong."""
    details = error.errors()
    return [
        detail
        for detail in details
        if detail["type"] != "too_short"
        or not any(other is not detail and other["loc"][: len(detail["loc"])] == detail["loc"] for other in details)
    ]


def place_of(error: ErrorDetails) -> Place:
    """Return where the error stands in the file: pydantic's place has the chosen `method` of a draft in it, or how the
    replicas are written."""
    place: Place = tuple(error["loc"])
    tags = {_draft_at(place), _replicas_at(place)} - {0}
    written = tuple(part for index, part in enumerate(place) if index not in tags)
    return (*written, "method") if error["type"] in _TAG_ERRORS else written


def describe_error(error: ErrorDetails, root: type[BaseModel] = ClusterConfig) -> str:
    """Return one line that names the key, what is wrong with its value, and the way out. `root`: what the whole file
    is."""
    place: Place = tuple(error["loc"])
    name = format_place(place_of(error))
    if error["type"] == "extra_forbidden":
        return f"{name}: unknown key; {_find_way_out(place, root)}"
    if error["type"] in ("missing", "union_tag_not_found"):
        return f"{name}: is missing"
    if error["type"] == "union_tag_invalid":
        return f"{name}: must be {', '.join(map(repr, METHODS))}, not {format_value(error['input']['method'])}"
    if error["input"] is None:
        return f"{name}: has no value; write one, or leave the key out"
    return f"{name}: {_reason(error, place, root)}"


def _reason(error: ErrorDetails, place: Place, root: type[BaseModel]) -> str:
    value, kind = error["input"], error["type"]
    context: dict[str, Any] = error.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind.startswith("byte_size"):
        return f"{format_value(value)} is no size; write a number and a unit, as in '2 GiB'"
    if kind in ("literal_error", "enum"):
        return f"must be {context['expected']}, not {format_value(value)}"
    if kind == "string_type":
        return f"must be text, not {format_value(value)}" + (
            "" if isinstance(value, (dict, list)) else "; put it in quotes"
        )
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "string_too_long":
        return f"must have at most {context['max_length']} characters, not {len(str(value))}"
    if kind == "too_short":
        return f"must have at least {context['min_length']} item(s), not {context['actual_length']}"
    if kind == "too_long":
        return f"must have at most {context['max_length']} item(s), not {context['actual_length']}"
    if kind in _RANGE_ERRORS and isinstance(place[-1], str) and place[-1] != COUNTED:  # a key, not an item of its value
        return f"must be {_range_of(place, root)}, not {format_value(value)}"
    wanted = _KINDS.get(kind) or f"must be {error['msg'].removeprefix('Input should be ')}"
    return f"{wanted}, not {format_value(value)}"


def _range_of(place: Place, root: type[BaseModel]) -> str:
    """Return the whole range of the key, not only the end that the value missed."""
    bounds: dict[str, Any] = {}
    for rule in _model_at(place[:-1], root).model_fields[str(place[-1])].metadata:
        bounds |= {end: getattr(rule, end) for end in ("ge", "le") if hasattr(rule, end)}
    if len(bounds) == 2:  # both ends
        return f"{bounds['ge']} to {bounds['le']}"
    return f"at least {bounds['ge']}" if "ge" in bounds else f"at most {bounds['le']}"


def _find_way_out(place: Place, root: type[BaseModel]) -> str:
    """Say what an unknown key was meant to be: one that stands elsewhere for this target, or one that looks like it."""
    key, section = str(place[-1]), _model_at(place[:-1], root)
    if section is Target and (elsewhere := find_first_place(key)):
        return f"of the first target it is {elsewhere}"
    if section is EndpointDraft and key in ModelDraft.model_fields:
        return f"it says how a model is loaded here, and with endpoint none is; leave {key} or endpoint out"
    if section is FurtherTarget and key in OWN_KEYS and OWN_KEYS[key]:
        return f"write {', '.join(OWN_KEYS[key])} here, without {key}"
    valid = sorted(section.model_fields)
    meant = " or ".join(map(repr, find_near(key, valid)))
    return f"did you mean {meant}?" if meant else f"valid keys are {', '.join(valid)}"


def find_near(name: str, known: Iterable[str]) -> list[str]:
    """Return which of the `known` names looks like one that is not there: both of two that are very much like it, and
    none that is only the least unlike."""
    known = list(known)
    surely = difflib.get_close_matches(name, known, n=2, cutoff=_SURELY_MEANT)
    return surely or difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)


def _model_at(place: Place, root: type[BaseModel]) -> type[BaseModel]:
    """Return the model whose keys stand at `place`."""
    model = root
    if at := _draft_at(place):
        model, place = DRAFTS[str(place[at])], place[at + 1 :]
    elif at := _replicas_at(place):
        model, place = ReplicaBounds if place[at] == BOUNDED else ReplicaTarget, place[at + 1 :]
    for part in place:
        if isinstance(part, str):
            model = _section_of(model.model_fields[part]) or model
    return model


def _draft_at(place: Place) -> int:
    """Return where a draft's method stands in pydantic's place; 0 for what is not in a draft."""
    ends = range(2, len(place))
    return next((at for at in ends if place[at - 2] == "drafts" and place[at] in DRAFTS), 0)


def _replicas_at(place: Place) -> int:
    """Return where pydantic's place says how replicas are written; 0 for what is not in them."""
    at = {"model": 2, "models": 3}.get(str(place[0]), 0) if place else 0
    return at if at and len(place) > at and place[at - 1] == "replicas" and place[at] in _WRITTEN else 0


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    return next(_list_sections(field.annotation), None)


def _list_sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections that a type has in it, whatever is around them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _list_sections(part)
