"""A daemon whose drafts come from a real llama-server: the same text while that is killed, stopped and started."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.daemon import Daemon, configuration, running
from tests.support.llama_server import LlamaServer, running_llama_server
from tests.support.waiting import until

pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.slow

PROMPTS = ("List the first ten even numbers.", "Count from one to twenty, in words.")
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 7}
GREEDY: dict[str, Any] = {"temperature": 0.0}
PLAIN = {"speculative_config": {"method": "off"}}
DRAFTED = {"speculative_config": {"num_speculative_tokens": 4}}


@pytest.fixture
def server(default_model_path, tmp_path):
    with running_llama_server(default_model_path, tmp_path) as server:
        yield server


@pytest.fixture
def daemon(default_model_path, server, tmp_path):
    path = tmp_path / "cluster.yaml"
    # Whatever the machine has to do beside, a round waits for drafts, and a server that is stopped is given up soon.
    draft = f"{{method: model, endpoint: '{server.url}', overlap: always, max_wait_ms: 10000, answer_timeout_s: 3}}"
    path.write_text(
        f"model: {{source: {default_model_path}, name: small, adapter: llama_cpp}}\n"
        f"drafts: [{draft}]\ndevices: {{threads: 1}}\nlimits: {{kv_cache: 64 MiB, max_running: 2}}\n"
        f"api: {{port: 0, admin_socket: '{tmp_path}/admin.sock'}}\nstore: {{directory: '{tmp_path}/store'}}\n"
        f"cluster: {{runtime: local}}\nstate: {{directory: '{tmp_path}/state'}}\nlogging: {{format: json}}\n"
    )
    with running(path) as daemon:
        yield daemon


def ask(daemon: Daemon, prompt: str, extra: dict[str, Any], **fields: Any) -> str:
    answer = daemon.client.completions.create(
        model="small", prompt=prompt, max_tokens=48, extra_body={"ignore_eos": True, **extra}, **fields
    )
    return answer.choices[0].text


def ask_all(daemon: Daemon, extra: dict[str, Any]) -> list[str]:
    """Return the texts of all prompts, greedy and seeded, two at a time."""
    kinds = [(prompt, fields) for prompt in PROMPTS for fields in (GREEDY, SEEDED)]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda kind: ask(daemon, kind[0], extra, **kind[1]), kinds))


def find_drafter(daemon: Daemon) -> dict[str, Any]:
    (state,) = daemon.status()["gauges"]["drafters"]
    return state


def wait_for_state(daemon: Daemon, *states: str) -> dict[str, Any]:
    """Wait until its drafter is in one of these states; asked meanwhile, as only rounds notice."""
    until(lambda: ask(daemon, "So", DRAFTED) and find_drafter(daemon)["state"] in states)
    return find_drafter(daemon)


def stream_over(daemon: Daemon, server: LlamaServer, signals: list[int]) -> str:
    """Return a stream's text; the server gets the signals in its midst."""
    stream = daemon.client.completions.create(
        model="small",
        prompt=PROMPTS[0],
        max_tokens=48,
        stream=True,
        extra_body={"ignore_eos": True, **DRAFTED},
        **SEEDED,
    )
    text = ""
    for number, chunk in enumerate(stream):
        text += "".join(choice.text for choice in chunk.choices)
        if number == 3:
            for sent in signals:
                server.send_signal(sent)
    return text


def test_the_text_is_the_targets_whatever_becomes_of_the_server(daemon, server, outrider):
    wait_for_state(daemon, "ok")
    plain = ask_all(daemon, PLAIN)
    assert ask_all(daemon, DRAFTED) == plain
    state = find_drafter(daemon)
    assert state["accepted"] > 0
    assert (state["adapter"], state["method"]) == ("llama-server", "model")
    shown = outrider("status", "--socket", str(daemon.admin)).stdout
    assert server.url in shown

    assert stream_over(daemon, server, [signal.SIGSTOP]) == plain[1]
    hung = wait_for_state(daemon, "hung", "lost")
    assert hung["reason"]
    server.send_signal(signal.SIGCONT)
    wait_for_state(daemon, "ok")
    assert stream_over(daemon, server, [signal.SIGKILL]) == plain[1]
    lost = wait_for_state(daemon, "lost")
    assert server.url in lost["reason"]
    assert "its endpoint is lost" in daemon.log.read_text()
    assert ask_all(daemon, DRAFTED) == plain
    server.kill()
    server.start()
    wait_for_state(daemon, "ok")
    before = find_drafter(daemon)["accepted"]
    assert ask_all(daemon, DRAFTED) == plain
    assert find_drafter(daemon)["accepted"] > before
    assert daemon.status()["totals"]["restarts"] == 0


def test_a_server_of_another_vocabulary_is_refused_or_translated(default_model_path, server, tmp_path):
    """The target is the simulated model: what the server says is useless, and the answers are the target's."""
    fields: dict[str, Any] = {"model": "toy", "prompt": "the sea is", "max_tokens": 24, **GREEDY}
    draft = f"method: model, endpoint: '{server.url}', overlap: always"
    with running(configuration(tmp_path, script="base_ms=20", extra=f"drafts: [{{{draft}}}]")) as daemon:
        plain = daemon.client.completions.create(**fields, extra_body=PLAIN).choices[0].text
        until(lambda: find_drafter(daemon)["state"] == "refused")
        assert "another vocabulary than the target: id " in find_drafter(daemon)["reason"]
        assert daemon.client.completions.create(**fields, extra_body=DRAFTED).choices[0].text == plain
        assert daemon.stop() == 0
    translated = f"drafts: [{{{draft}, source: '{default_model_path}', mismatched_vocabulary: translate}}]"
    with running(configuration(tmp_path, script="base_ms=20", extra=translated)) as daemon:

        def is_asked() -> bool:
            assert daemon.client.completions.create(**fields, extra_body=DRAFTED).choices[0].text == plain
            return bool(find_drafter(daemon)["remote"]["late"])

        until(is_asked)
        state = find_drafter(daemon)
        assert (state["state"], state["vocabulary"]) == ("ok", "translated")
