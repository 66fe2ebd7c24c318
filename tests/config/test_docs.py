"""Documentation and schema say the same, in both directions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from orchestrator.config.drafts import DRAFTS
from orchestrator.config.load import load_text
from orchestrator.config.schema import json_schema
from orchestrator.config.source_text import parse_text
from orchestrator.errors import ConfigError
from tests.support.config import parse_config
from tests.support.tiny_gguf import Tiny, write

ROOT = Path(__file__).parents[2]
ROW = re.compile(
    r"^\| `(?P<key>[^`]+)` \| (?P<kind>[^|]+) \| (?P<default>[^|]+) \| [^|]+ \| `(?P<example>[^`|]+)` \|$", re.MULTILINE
)


DRAFT_SECTIONS = {
    "drafts[model].workers": "method: model, source: x, workers",
    "drafts[suffix].store_options": "method: suffix, store: disk, store_options",
}


_NEEDED = {
    "model": {"source": "x"},
    "index": {"path": "x.drafts"},
    "head": {"source": "x"},
    "endpoint": {"method": "model", "endpoint": "http://x:8080"},
}


def read_documented() -> dict[str, str]:
    """Key -> default, from the tables of docs/configuration.md."""
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    return {row["key"]: row["default"].strip().strip("`") for row in ROW.finditer(text)}


def example_of_model(section: str, name: str, value: str) -> str:
    if section == "model.shards[]":
        return f"model: {{source: x.gguf, shards: [{{{_complete({name: value}, layers='1')}}}, {{layers: 1}}]}}\n"
    if section == "model.adapters[]":
        return f"model: {{source: x.gguf, adapters: [{{{_complete({name: value}, name='a', source='y.gguf')}}}]}}\n"
    one = f"  - {{{_complete({name: value}, source='y.gguf', name='b')}}}\n"
    return f"model: {{source: x.gguf, name: a}}\nmodels:\n{one}"


def example_of(key: str, value: str) -> str:
    """A whole cluster.yaml in which `key` has this value, written as it stands in the documentation."""
    section, _, name = key.rpartition(".")
    if section.startswith(("models[]", "model.shards[]", "model.adapters[]")):
        return example_of_model(section, name, value)
    if section == "model.replicas[]":
        return f"model: {{source: x.gguf, replicas: [{{{name}: {value}}}]}}\n"
    if section.startswith("model.replicas"):
        mine = f"places: [{{{name}: {value}}}]" if section.endswith("[]") else f"{name}: {value}"
        return f"model: {{source: x.gguf, replicas: {{{mine}{'' if name == 'max' else ', max: 2'}}}}}\n"
    if section == "failover.standby[]":
        return f"model: {{source: x.gguf}}\nfailover: {{standby: [{{{name}: {value}}}]}}\n"
    if section in DRAFT_SECTIONS:
        return f"model: {{source: x.gguf}}\ndrafts: [{{{DRAFT_SECTIONS[section]}: {{{name}: {value}}}}}]\n"
    if section.startswith("hosts[]"):
        host = (
            f"devices: [{{{_complete({name: value}, device='CPU')}}}]" if "devices" in section else f"{name}: {value}"
        )
        entry = host if name == "name" else f"name: a, {host}"
        return f"model: {{source: x.gguf}}\nhosts: [{{{entry}}}]\n"
    if section == "links.between[]":
        link = _complete({name: value}, hosts="[a, b]", rtt_ms="1", gbit_per_s="1")
        return f"model: {{source: x.gguf}}\nlinks: {{between: [{{{link}}}]}}\n"
    if key in ("hosts", "models"):
        return f"model: {{source: x.gguf}}\n{key}: {value}\n"
    if "." in section:
        outer, inner = section.split(".")
        return f"model: {{source: x.gguf}}\n{outer}:\n  {inner}:\n    {name}: {value}\n"
    if section == "model":
        written = {"source": "x.gguf"} | {name: value}
        return "model:\n" + "".join(f"  {one}: {text}\n" for one, text in written.items())
    if section.startswith("drafts["):
        method = section[len("drafts[") : -1]
        written = {"method": method} | _NEEDED.get(method, {}) | {name: value}
        items = ", ".join(f"{one}: {text}" for one, text in written.items())
        return f"model: {{source: x.gguf}}\ndrafts: [{{{items}}}]\n"
    return f"model: {{source: x.gguf}}\n{section}:\n  {name}: {value}\n"


def _complete(values: dict[str, str], **others: str) -> str:
    """The items of a mapping, with those that it has to have."""
    return ", ".join(f"{key}: {text}" for key, text in (others | values).items())


EXAMPLES = {
    row["key"]: row["example"] for row in ROW.finditer((ROOT / "docs" / "configuration.md").read_text(encoding="utf-8"))
}


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json_schema()
    found = jsonschema.validators.validator_for(schema)
    found.check_schema(schema)
    return found(schema)


@pytest.mark.parametrize("key", EXAMPLES)
def test_every_example_is_accepted_by_the_daemon_and_by_the_schema(validator, key):
    text = example_of(key, EXAMPLES[key])
    parse_config(text, Path("example.yaml"))
    validator.validate(yaml_1_2(text))


def yaml_1_2(text: str) -> Any:
    """The values as an editor reads them."""
    return parse_text(text, Path("example.yaml"))[0]


def read_described() -> dict[str, str]:
    """Key -> default, from the schema."""
    schema = json_schema()
    found: dict[str, str] = {}

    def walk(section: dict[str, Any], prefix: str) -> None:
        required = section.get("required", [])
        for key, value in section["properties"].items():
            if prefix == "models[]." and value == schema["$defs"]["Target"]["properties"].get(key):
                continue  # as in `model`
            if key == "drafts" and not prefix:  # elsewhere: as there
                for tag, kind in DRAFTS.items():
                    walk(schema["$defs"][kind.__name__], f"{key}[{tag}].")
                continue
            for place in (one["items"]["$ref"] for one in value.get("oneOf", []) if "items" in one):
                walk(schema["$defs"][place.rsplit("/", 1)[-1]], f"{prefix}{key}[].")
            for place in (one["$ref"] for one in value.get("oneOf", []) if "$ref" in one):
                walk(schema["$defs"][place.rsplit("/", 1)[-1]], f"{prefix}{key}.")
            if place := value.get("items", {}).get("$ref", ""):
                walk(schema["$defs"][place.rsplit("/", 1)[-1]], f"{prefix}{key}[].")
            target = value.get("$ref", "")
            inner = schema["$defs"].get(target.rsplit("/", 1)[-1], {})
            if "properties" in inner:
                walk(inner, f"{prefix}{key}.")
            else:
                default = value.get("default", "")
                text = default if isinstance(default, str) else json.dumps(default)
                found[prefix + key] = "required" if key in required else text or '""'

    walk(schema, "")
    return found


def test_every_key_is_documented_with_its_default_and_no_other_is():
    assert read_documented() == read_described()


def test_the_shipped_schema_is_current_and_accepts_the_shipped_configuration():
    shipped = json.loads((ROOT / "docs" / "cluster.schema.json").read_text(encoding="utf-8"))
    assert shipped == json_schema(), "run: outrider config schema > docs/cluster.schema.json"
    jsonschema.Draft202012Validator.check_schema(shipped)
    examples = ("cluster.yaml", "docs/cluster-with-drafts.yaml", "docs/cluster-on-demand.yaml")
    for example in (ROOT / name for name in examples):
        text = example.read_text(encoding="utf-8")
        parse_config(text, example)
        jsonschema.validate(yaml.safe_load(text), shipped)


@pytest.mark.parametrize("wrong", ["2", "2 GX", "GiB", "-1 GiB", "2 Gibit", "2 GiB or so", ""])
def test_the_schema_and_the_daemon_refuse_the_same_sizes(wrong):
    config = {"model": {"source": "x"}, "limits": {"kv_cache": wrong}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config, json_schema())
    with pytest.raises(ConfigError, match="is no size"):
        parse_config(json.dumps(config), Path("c.yaml"))


@pytest.mark.parametrize("text", re.findall(r"(?ms)^```yaml\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8")))
def test_an_example_of_the_readme_is_taken(text: str, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "mac.key").write_text("key")
    (tmp_path / "mac.key").chmod(0o600)
    for source in re.findall(r"models/\S+\.gguf", text):
        write(tmp_path / source, Tiny("llama"))
    assert load_text(text, tmp_path / "cluster.yaml").model.source
