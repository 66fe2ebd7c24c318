"""How each key takes effect: the table has a line for all of them, changes are found, and what waits is left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.config.changes import apply_changes, format_setting, list_changes
from orchestrator.config.effective import list_settings
from orchestrator.config.effects import EFFECTS, MEANINGS, Effect, find_effect, find_line, list_lines
from orchestrator.config.load import check_config, load_text, parse_config
from orchestrator.config.model import ClusterConfig
from orchestrator.config.section import Section
from orchestrator.config.source_text import Place
from orchestrator.daemon.bootstrap.target_change import explain_wait
from orchestrator.errors import ConfigError
from orchestrator.redaction import redact_secrets

ROOT = Path(__file__).parents[2]
BASE = "model: {source: 'simulated:toy', adapter: simulated, name: toy}\n"
TWO = BASE + "models:\n  - {source: 'simulated:toy', adapter: simulated, name: other%s}\n"


def read(text: str) -> ClusterConfig:
    return load_text(text, Path("cluster.yaml"))


def list_effects(old: str, new: str) -> dict[str, str]:
    return {one.name: one.effect.value for one in list_changes(read(old), read(new))}


@pytest.mark.parametrize(
    ("old", "new", "place", "why"),
    [
        ("", ", replicas: 2", "replicas", ""),
        ("", ", replicas: {min: 1, max: 3}", "replicas", "the number of replicas follows load"),
        (", replicas: {min: 1, max: 3}", "", "replicas", "the number of replicas follows load"),
        ("", ", device: auto", "device", "there is no plan yet"),
    ],
)
def test_a_change_to_what_only_a_start_can_begin_waits_for_it(old: str, new: str, place: str, why: str) -> None:
    before, after = (
        parse_config(BASE.replace("name: toy", f"name: toy{one}"), Path("cluster.yaml"))[0] for one in (old, new)
    )
    assert explain_wait(before, after, ("model", place), planned=False) == why


def test_a_change_waits_for_nothing_of_a_target_that_it_is_not_about() -> None:
    two = TWO % ", replicas: {min: 1, max: 3}"
    texts = (two, f"{two}drafts: []\nlimits: {{kv_cache: 96 MiB}}\n")
    before, after = (parse_config(text, Path("cluster.yaml"))[0].targets for text in texts)
    told = [
        [explain_wait(*pair, place, planned=False) for pair in zip(before, after, strict=True)]
        for place in (("drafts",), ("limits", "kv_cache"))
    ]
    assert told == [["", ""], ["", "the number of replicas follows load"]]


def test_every_key_of_the_language_has_a_line_of_its_own() -> None:
    """A section is a line as a whole, or each of its keys is one: no new key takes effect by accident."""
    for section, field in ClusterConfig.model_fields.items():
        if (section,) in EFFECTS:
            assert not [place for place in EFFECTS if len(place) == 2 and place[0] == section]
            continue
        kind = field.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, Section)
        missing = [name for name in kind.model_fields if (section, name) not in EFFECTS]
        assert not missing, f"say in orchestrator/config/effects.py how {section}.{missing} take effect"


def test_every_line_is_of_a_key_that_there_is() -> None:
    for place in EFFECTS:
        field = ClusterConfig.model_fields[str(place[0])]
        if len(place) == 2:
            assert isinstance(field.annotation, type)
            assert issubclass(field.annotation, Section)
            assert place[1] in field.annotation.model_fields
    assert set(MEANINGS) == set(Effect)


@pytest.mark.parametrize(
    ("place", "effect"),
    [
        (("limits", "max_waiting"), Effect.LIVE),
        (("speculation", "pid", "set_point"), Effect.LIVE),
        (("drafts", 0, "source"), Effect.DRAFTS),
        (("models", 1, "drafts"), Effect.DRAFTS),
        (("models", 1, "max_waiting"), Effect.LIVE),
        (("models", 1, "kv_cache"), Effect.ROLL),
        (("models", 1, "threads"), Effect.ROLL),
        (("models", 1, "weights"), Effect.ROLL),
        (("models", 1, "source"), Effect.RESTART),
        (("models", 1, "slo", "ttft_ms"), Effect.LIVE),
        (("models",), Effect.RESTART),
        (("api", "tls", "key"), Effect.RESTART),
        (("hosts", 3, "name"), Effect.RESTART),
    ],
)
def test_a_place_has_the_effect_of_its_line(place: Place, effect: Effect) -> None:
    assert find_effect(place) is effect


def test_a_place_that_no_line_is_for_is_an_error() -> None:
    assert find_line(("limits", "new_key")) is None
    with pytest.raises(KeyError):
        find_effect(("limits", "new_key"))


def test_changes_are_told_by_key_with_what_they_were() -> None:
    found = list_changes(read(BASE), read(BASE + "limits: {kv_cache: 2 GiB, max_waiting: 3}\ndrafts: []\n"))
    assert [(one.name, one.before, one.after) for one in found] == [
        ("drafts", '[{"method": "suffix"}]', "[]"),
        ("limits.kv_cache", "1 GiB", "2 GiB"),
        ("limits.max_waiting", "256", "3"),
    ]
    assert list_effects(BASE, BASE) == {}


def test_a_default_that_is_written_down_is_no_change() -> None:
    assert list_effects(BASE, BASE + "limits: {max_waiting: 256}\nspeculation: {}\n") == {}


def test_models_are_compared_by_name_and_place() -> None:
    assert list_effects(TWO % "", TWO % ", kv_cache: 2 GiB") == {"models[0].kv_cache": "roll"}
    assert list_effects(TWO % "", TWO % ", max_waiting: 1") == {"models[0].max_waiting": "live"}
    assert list_effects(TWO % "", TWO % ", slo: {ttft_ms: 3}") == {"models[0].slo": "live"}
    assert list_effects(TWO % "", TWO % ", failover: {after_s: 3}") == {"models[0].failover": "roll"}
    assert list_effects(TWO % "", BASE) == {"models": "restart"}
    renamed = TWO.replace("other", "third") % ""
    assert list_effects(TWO % "", renamed) == {"models": "restart"}


def test_what_waits_for_a_restart_is_left_as_it_was_and_the_rest_is_taken() -> None:
    old = read(TWO % "")
    new = read((TWO % ", max_waiting: 1, threads: 2") + "api: {port: 9}\nlimits: {max_waiting: 4}\nslo: {ttft_ms: 9}\n")
    changes = list_changes(old, new)
    merged = apply_changes(old, new, changes)
    assert (merged.api.port, merged.limits.max_waiting, merged.slo.ttft_ms) == (8000, 4, 9.0)
    assert merged.targets[1].limits.max_waiting == 1
    assert merged.targets[1].number == 1
    assert [one.name for one in list_changes(merged, new)] == ["api.port"]
    check_config(merged, Path("cluster.yaml"), {})


def test_keys_that_nobody_wrote_do_not_seem_written_once_merged() -> None:
    """Some checks look at which keys were written."""
    new = read(BASE + "slo: {tpot_ms: 5}\napi: {port: 9}\n")
    merged = apply_changes(read(BASE), new, list_changes(read(BASE), new))
    assert merged.slo.model_fields_set == {"tpot_ms"}
    assert merged.api.model_fields_set == set()
    check_config(merged, Path("cluster.yaml"), {})


def test_a_reason_makes_a_change_wait() -> None:
    old, new = read(BASE), read(BASE + "limits: {max_waiting: 3, max_body: 1 KiB}\n")
    found = list_changes(old, new, lambda place: "so it is" if place[-1] == "max_body" else "")
    assert [(one.name, one.effect, one.why) for one in found] == [
        ("limits.max_waiting", Effect.LIVE, ""),
        ("limits.max_body", Effect.RESTART, "so it is"),
    ]
    assert apply_changes(old, new, found).limits.max_body == old.limits.max_body


@pytest.mark.parametrize(
    "secret",
    ["outrider-Zr7hX2mQ9vK4pT1wB8sN6yL3", "hf_QwErTyUiOpAsDfGhJkLz", "redis://user:pass@host", "https:/me:pass@host"],
)
def test_secrets_are_not_told(secret: str) -> None:
    hidden = secret.partition("//user:")[2].partition("@")[0] or secret
    for text in (redact_secrets(secret), format_setting([secret]), str(ConfigError(f"x: {secret}"))):
        assert hidden not in text
        assert "pass" not in text
        assert "[redacted]" in text
    assert redact_secrets("hf:ORG/NAME@main and package:a/b and /a/b") == "hf:ORG/NAME@main and package:a/b and /a/b"


def test_each_value_says_where_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("cluster.yaml")
    text = BASE + "limits:\n  max_waiting: 3\ndrafts:\n  - {method: suffix, max_match: 4}\n"
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/outrider")
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    found = {one.name: (one.value, one.origin) for one in list_settings(*_with_lines(text, path))}
    assert found["limits.max_waiting"] == ("3", "cluster.yaml:3")
    assert found["limits.max_body"] == ("8 MiB", "default")
    assert found["drafts[0].max_match"] == ("4", "cluster.yaml:5")
    assert found["drafts[0].memory"] == ("64 MiB", "default")
    assert found["store.directory"] == ("/var/cache/outrider", "environment CACHE_DIRECTORY")
    assert found["state.directory"][1] == "derived"
    merged = list_settings(*_with_lines("a: &a {max_waiting: 4}\n".replace("a: &a", "limits:") + BASE, path))
    assert next(one for one in merged if one.name == "limits.max_waiting").origin == "cluster.yaml:1"
    other = {one.name: one.origin for one in list_settings(*_with_lines(TWO % "", path))}
    assert other["models[0].slo"] == "as slo"


def _with_lines(text: str, path: Path) -> tuple[ClusterConfig, Path, dict[Place, int]]:
    config, lines = parse_config(text, path)
    return config, path, lines


def build_table() -> str:
    """The table of docs/configuration.md, from the one of the code."""
    rows = ["| takes effect | keys |", "|---|---|"]
    for effect in Effect:
        cells = [
            f"`{section}`: {', '.join(f'`{key}`' for key in keys)}" if keys else f"`{section}`"
            for section, keys in list_lines(effect)
        ]
        rows.append(f"| `{effect.value}`: {MEANINGS[effect]} | {'; '.join(cells)} |")
    return "\n".join(rows)


def test_the_documentation_has_the_table() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- effects -->\n(.*?)\n<!-- end -->", text, re.DOTALL)
    assert found is not None
    assert found[1] == build_table()
