"""What every mapping of a configuration file is made of."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field
from pydantic_core import PydanticCustomError

SIZE_EXAMPLES = ["512 MiB", "2 GiB"]
SIZE_PATTERN = r"^\s*[0-9]+(\.[0-9]+)?\s*([KkMmGgTtPp][Ii]?)?[Bb]\s*$"


def _with_a_unit(value: object) -> object:
    """Hold back what pydantic would take: numbers without a unit, bits, and text behind the size."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError(f"needs a unit, as in '{value} MiB' or '{value} GiB'")
    if not isinstance(value, str) or not re.fullmatch(SIZE_PATTERN, value):
        raise PydanticCustomError("byte_size", "is no size")
    return value


Size = Annotated[
    ByteSize,
    BeforeValidator(_with_a_unit),
    Field(json_schema_extra={"examples": list(SIZE_EXAMPLES)}),
]


def _as_a_reserve(value: ByteSize) -> ByteSize:
    if value < LEAST_RESERVE_BYTES:
        raise ValueError("is less than 256 KiB, which is too little to keep an answer")
    return value


# ADR 0106: two slots of 128 KiB. Not tuned.
LEAST_RESERVE_BYTES = 256 * 1024
ReserveSize = Annotated[Size, AfterValidator(_as_a_reserve)]


def is_http_url(text: str) -> bool:
    """Return whether a text is a URL of HTTP with a host and a usable port."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, or half an address of IPv6
        return False


Price = Annotated[float, Field(ge=0, le=1_000_000)]


class Section(BaseModel):
    """One mapping of cluster.yaml: unknown keys are errors, values are not converted, nothing changes later.

    A section's validator is built when it is first used. The docstrings of its keys are read for the schema alone
    (`orchestrator.config.schema`): both would make each start longer.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", defer_build=True)
