"""What the parts of request bodies are made of: strict ones, and those of a history, which come from anywhere."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

NO_MEDIA = "the served model takes text only"
_SHOWN_CHARS = 60
_ALIKE = 0.8
# Keys of messages that put something else before the model than the text does.
_CHANGE_THE_PROMPT = ("images", "audio", "videos", "function_call", "prefix", "partial")
# What others call the schema of a tool's arguments.
_OTHER_SCHEMAS = frozenset({"input_schema", "inputSchema", "args_schema", "schema", "parametersJsonSchema"})
_IDLE: tuple[Any, ...] = (None, False, "", [], {})


class Body(BaseModel):
    """A strict part of a request. A null asks for nothing: it counts as left out, whatever it is of."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or _is_required(cls, key)}


class Said(BaseModel):
    """A part of a conversation. Clients send back what servers said, with whatever fields those have: fields that say
    nothing to a model are left out."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Offered(Said):
    """A part of a tool. Hints for caches and clients are left out; a field that another one seems to mean, and that is
    not there itself, is refused."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_misspelt(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = [field.alias or name for name, field in cls.model_fields.items()]
        left = [name for name in known if name not in data]
        for key in data.keys() - set(known):
            meant = "parameters" if key in _OTHER_SCHEMAS and "parameters" in left else _find_alike(key, left)
            if meant and data[key] is not None:
                text = f"unknown field {show(key)} of a tool; did you mean '{meant}'?"
                raise PydanticCustomError("unknown_field", "{text}", {"field": "tools", "text": text})
        return {key: value for key, value in data.items() if value is not None or _is_required(cls, key)}


def show(text: str) -> str:
    """Return a text of a client's as errors show it: short, quoted, and all of it can be sent."""
    return repr(text[:_SHOWN_CHARS].encode("utf-8", "backslashreplace").decode())


def tag_kind(part: Any) -> str:
    """Return the tag that a part's `type` chooses its model by."""
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return f"kind={kind}"


def check_kind(value: Any, known: Collection[str], what: str, field: str, ways_out: Mapping[str, str]) -> Any:
    """Return a part whose `type` is known. Raises PydanticCustomError with what is taken, and the way out. `field`:
    what the error names; with "" the place of the part."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in known:
        way_out = next((text for prefix, text in ways_out.items() if kind.startswith(prefix)), "")
        why = f": {way_out}" if way_out else ""
        taken = ", ".join(f"'{name}'" for name in sorted(known))
        text = f"{what} of type {show(kind)} are not supported{why} (taken: {taken})"
        named = {"field": field} if field else {"inside": "type"}
        raise PydanticCustomError("not_supported", "{text}", {"text": text, **named})
    return value


def refuse_prompt_keys(data: Any) -> Any:
    """Return a message without keys that would change the prompt and are not served, where they ask for nothing.
    Raises PydanticCustomError where they ask for something."""
    if not isinstance(data, dict):
        return data
    for key in _CHANGE_THE_PROMPT:
        if key in data and not any(data[key] is idle or data[key] == idle for idle in _IDLE):
            why = "send 'tool_calls' instead" if key == "function_call" else "it would change what the model reads"
            text = f"'{key}' of a message is not supported: {why}"
            raise PydanticCustomError("not_supported", "{text}", {"inside": key, "text": text})
    return {key: value for key, value in data.items() if key not in _CHANGE_THE_PROMPT}


def refuse_empty(role: str, content: Any) -> None:
    """Raise PydanticCustomError where a message has no content that its role needs."""
    if content is None or (content == [] and role != "tool"):
        text = f"a message of the role '{role}' has no 'content'"
        raise PydanticCustomError("missing_parameter", "{text}", {"inside": "content", "text": text})


def _find_alike(key: str, known: Collection[str]) -> str:
    return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=_ALIKE)), "")


def _is_required(cls: type[BaseModel], key: str) -> bool:
    return any(key in (name, field.alias) and field.is_required() for name, field in cls.model_fields.items())
