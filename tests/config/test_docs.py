"""Documentation and schema say the same, in both directions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from orchestrator.config.schema import json_schema

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `(?P<key>[^`]+)` \| (?P<kind>[^|]+) \| (?P<default>[^|]+) \|", re.MULTILINE)


def documented() -> dict[str, str]:
    """Key -> default, from the tables of docs/configuration.md."""
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    return {row["key"]: row["default"].strip().strip("`") for row in ROW.finditer(text)}


def described() -> dict[str, str]:
    """Key -> default, from the schema."""
    schema = json_schema()
    found: dict[str, str] = {}

    def walk(section: dict[str, Any], prefix: str) -> None:
        required = section.get("required", [])
        for key, value in section["properties"].items():
            target = value.get("$ref") or value.get("items", {}).get("$ref", "")
            inner = schema["$defs"].get(target.rsplit("/", 1)[-1], {})
            if "properties" in inner:
                walk(inner, f"{prefix}{key}{'[]' if 'items' in value else ''}.")
            else:
                default = value.get("default", "")
                text = default if isinstance(default, str) else json.dumps(default)
                found[prefix + key] = "required" if key in required else text or '""'

    walk(schema, "")
    return found


def test_every_key_is_documented_with_its_default_and_no_other_is():
    assert documented() == described()


def test_the_shipped_schema_is_current_and_accepts_the_shipped_configuration():
    shipped = json.loads((ROOT / "docs" / "cluster.schema.json").read_text(encoding="utf-8"))
    assert shipped == json_schema(), "run: outrider config schema > docs/cluster.schema.json"
    jsonschema.Draft202012Validator.check_schema(shipped)
    jsonschema.validate(yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8")), shipped)


@pytest.mark.parametrize("wrong", ["2", "2 GX", "GiB", "-1 GiB"])
def test_the_schema_refuses_sizes_that_the_daemon_refuses(wrong):
    config = {"model": {"source": "x"}, "limits": {"kv_cache": wrong}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config, json_schema())
