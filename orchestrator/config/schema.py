"""The JSON Schema of cluster.yaml, so that editors complete and check it."""

from __future__ import annotations

from typing import Any

from orchestrator.config.model import ClusterConfig
from orchestrator.config.section import SIZE_EXAMPLES, SIZE_PATTERN

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12); descriptions are the docstrings of the models."""
    schema = ClusterConfig.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        properties = section.get("properties", {})
        for key, described in properties.items():
            if _holds_sections(described.get("default")):
                del described["default"]  # a section's defaults stand at its own keys
            if described.get("examples") == SIZE_EXAMPLES:
                properties[key] = _size(described)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Outrider cluster.yaml",
    }


def _holds_sections(default: object) -> bool:
    return isinstance(default, dict) or (isinstance(default, list) and any(isinstance(part, dict) for part in default))


def size_text(count: int) -> str:
    """Return a number of bytes as cluster.yaml writes it ("64 MiB")."""
    unit, scale = next((name, scale) for name, scale in _UNITS if count % scale == 0 and (count or scale == 1))
    return f"{count // scale} {unit}"


def _size(described: dict[str, Any]) -> dict[str, Any]:
    """Sizes are written with a unit; pydantic would describe the integer that they become."""
    kept = {key: value for key, value in described.items() if key not in ("anyOf", "default")}
    kept |= {"type": "string", "pattern": SIZE_PATTERN}
    if "default" in described:
        value = described["default"]
        kept["default"] = size_text(int(value)) if isinstance(value, int) else _normal(str(value))
    return kept


def _normal(human: str) -> str:
    """pydantic writes "1.0GiB" for what people write as "1 GiB"."""
    number = human.rstrip("BGiMKT")
    return f"{float(number):g} {human[len(number) :]}"
