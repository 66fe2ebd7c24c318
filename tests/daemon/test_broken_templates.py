"""A chat template that is of no use is told before anybody asks: by commands, in the log, and then in the 400."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from openai import BadRequestError

from orchestrator.config.load import parse_config
from orchestrator.daemon.bootstrap import template_faults
from tests.support import tiny_models
from tests.support.daemon import outrider_process, running
from tests.support.hub_server import Hub, serving
from tests.support.waiting import until

BROKEN = "{% for m in messages %}{{ m.content | frobnicate }}{% endfor %}"
ENDLESS = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
)
REFUSES_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}{{ messages[0].content }}"
)


def write_cluster(directory: Path, template: str) -> Path:
    model = tiny_models.write_model(directory / "model", "qwen3")
    (model / "chat_template.jinja").write_text(template)
    config = directory / "cluster.yaml"
    config.write_text(
        "model:\n  source: model\n  name: tiny\n  activations: fp32\n"
        "cluster: {runtime: local}\nlimits: {kv_cache: 16 MiB, max_running: 4}\nlogging: {format: json}\n"
        f"api: {{port: 0, admin_socket: '{directory}/admin.sock'}}\nstore: {{directory: '{directory}/store'}}\n"
        f"state: {{directory: '{directory}/state'}}\n"
    )
    return config


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (BROKEN, "No filter named 'frobnicate'"),
        ("{{ messages[0].content['text'].upper() }}", "has no attribute 'text'"),
        ("{{ raise_exception('this model only completes') }}", "this model only completes"),
        (REFUSES_SYSTEM, ""),
    ],
)
def test_commands_tell_a_broken_template(tmp_path: Path, outrider, template: str, words: str) -> None:
    config = write_cluster(tmp_path, template)
    checked = outrider("config", "check", str(config))
    assert checked.returncode == 0
    assert "ok (checked:" in checked.stdout
    found = json.loads(outrider("doctor", "--json", "--config", str(config)).stdout)
    warned = [one for one in found if one["name"] == "chat template"]
    if not words:
        assert checked.stderr == ""
        assert warned == []
        return
    (line,) = checked.stderr.splitlines()
    assert line.startswith(f"outrider: {config}:2: model.source: ")
    assert words in line
    assert [one["verdict"] for one in warned] == ["warn"]
    assert words in warned[0]["found"]


@pytest.mark.parametrize("template", [ENDLESS, "{{ 'x' * 9999999999 }}"])
def test_a_template_that_goes_on_or_grows_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(template_faults, "_TIMEOUT_S", 1.5)
    path = write_cluster(tmp_path, template)
    config, lines = parse_config(path.read_text(), path)
    (fault,) = template_faults.list_template_faults(config, path, lines)
    assert "chats with it will be refused, completions not: the model's chat template " in fault


def test_requests_are_told_whose_fault_it_is(tmp_path: Path) -> None:
    with running(write_cluster(tmp_path, BROKEN)) as daemon:
        until(lambda: "the chat template is at fault" in daemon.log.read_text(), 20.0)
        with pytest.raises(BadRequestError, match=r"template itself is at fault.*frobnicate.*/v1/completions"):
            daemon.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
        assert daemon.client.completions.create(model="tiny", prompt="hi", max_tokens=2).choices[0].text is not None


def test_the_template_of_a_model_that_a_reload_takes_is_told(tmp_path: Path) -> None:
    config = write_cluster(tmp_path, "{{ messages[0].content }}")
    with running(config) as daemon:
        for template, times in ((BROKEN, 1), ("{{ messages[0].content }}!", 1), (BROKEN, 2)):
            (tmp_path / "model" / "chat_template.jinja").write_text(template)
            done = outrider_process("reload", "--socket", str(daemon.admin))
            assert done.returncode == 0, done.stderr
            until(lambda: daemon.log.read_text().count("the chat template is at fault") == times, 20.0)  # noqa: B023


def test_a_reload_tries_the_template_of_a_new_revision_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_cluster(tmp_path, "{{ messages[0].content }}")
    config.write_text(config.read_text().replace("source: model", "source: hf:org/tiny"))
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    hub = Hub({"org/tiny": files})
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with serving(hub):
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with running(config) as daemon:
            before = daemon.status()["ready"]["model_digest"]
            files["chat_template.jinja"] = BROKEN.encode()
            for known in (tmp_path / "home").glob("hub/*/refs/*"):  # the cache's word goes first
                known.unlink()
            done = outrider_process("reload", "--socket", str(daemon.admin))
            assert done.returncode == 0, done.stderr
            until(lambda: "the chat template is at fault" in daemon.log.read_text(), 20.0)
            assert daemon.status()["ready"]["model_digest"] != before
