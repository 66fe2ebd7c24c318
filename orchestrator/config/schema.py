"""The JSON Schema of cluster.yaml, so that editors complete and check it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from orchestrator.config.model import ClusterConfig
from orchestrator.config.section import SIZE_EXAMPLES, SIZE_PATTERN, Section

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12); descriptions are the docstrings of the models."""
    schema = ClusterConfig.model_json_schema()
    sections = {section.__name__: section for section in _list_sections(Section)}
    for name, section in ((ClusterConfig.__name__, schema), *schema["$defs"].items()):
        properties = section.get("properties", {})
        docstrings = _read_docstrings(sections[name]) if name in sections else {}
        for key, described in properties.items():
            of_section = schema["$defs"].get(described.get("$ref", "").rpartition("/")[2], {}).get("description")
            if key in docstrings and docstrings[key] != of_section:
                described.setdefault("description", docstrings[key])
            if _holds_sections(described.get("default")):
                del described["default"]  # a section's defaults stand at its own keys
            if described.get("examples") == SIZE_EXAMPLES:
                properties[key] = _size(described)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Outrider cluster.yaml",
    }


def _list_sections(base: type[Section]) -> Iterator[type[Section]]:
    for subclass in base.__subclasses__():
        yield subclass
        yield from _list_sections(subclass)


def _read_docstrings(section: type[Section]) -> dict[str, str]:
    """Return the docstrings of a section's keys, its parents' among them: the strings that follow the annotations."""
    docstrings: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if not issubclass(base, Section):
            continue
        definition = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(definition, ast.ClassDef)  # noqa: S101 -- what inspect returns for a class
        for key, text in pairwise(definition.body):
            match key, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    docstrings[name] = inspect.cleandoc(words)
    return docstrings


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
