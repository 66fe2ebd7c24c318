"""A real daemon and text that is made to end it: it answers 200 or 400 in time, keeps its memory, and stays."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.batches.test_batch_routes import create, lines_in, upload, wait_for_end
from tests.daemon.test_shards import write_tiny
from tests.support.daemon import Daemon, configuration, outrider_process, running
from tests.support.untrusted import DEADLY, UNSATISFIABLE, nest_names
from tests.support.waiting import until

BOUND_S = 4.0
SLACK_S = 6.0  # for a machine with much else to do
GROWTH_BYTES = 300 << 20
NAMES = ("a", "b")
PATTERNS = ("^[a-z]+$", "(a|b)*a(a|b){30}", "(x+x+)+y", "^(a?){40}a{40}$", "[0-9]{1,5000}", "(", "\\p{L}{3}")


def measure_bytes(daemon: Daemon) -> int:
    """What the daemon and the processes of its sandbox hold; its worker is another matter."""
    own = psutil.Process(daemon.process.pid)
    worker = daemon.status()["ready"]["pid"]
    total = own.memory_info().rss
    for one in own.children(recursive=True):
        with suppress(psutil.Error):
            total += 0 if one.pid == worker else one.memory_full_info().uss
    return total


class Watched:
    """A daemon, and what it held at first."""

    def __init__(self, daemon: Daemon, client: httpx.Client) -> None:
        self.daemon = daemon
        self.client = client
        self.model = daemon.status()["model"]
        self.ask({"prompt": "x", "response_format": {"type": "json_object"}})
        self.began_bytes = measure_bytes(daemon)

    def ask(self, body: dict[str, Any]) -> httpx.Response:
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        return self.client.post(path, json={"model": self.model, "max_tokens": 12} | body)

    def check(self, body: dict[str, Any]) -> httpx.Response:
        """Ask, and see that nothing is wrong with the answer or the daemon."""
        began_s = time.monotonic()
        answer = self.ask(body)
        assert answer.status_code in (200, 400), answer.text
        assert time.monotonic() - began_s < BOUND_S + SLACK_S
        assert self.daemon.process.poll() is None
        assert measure_bytes(self.daemon) - self.began_bytes < GROWTH_BYTES
        return answer


@contextmanager
def watching(daemon: Daemon) -> Iterator[Watched]:
    with httpx.Client(base_url=daemon.url, timeout=60.0) as client:
        yield Watched(daemon, client)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("schemas")
    limits = f"limits: {{translation_timeout_s: {BOUND_S}}}"
    with running(configuration(directory, extra=f"drafts: []\n{limits}")) as daemon:
        worker = daemon.status()["ready"]["pid"]
        with watching(daemon) as watched:
            yield watched
        assert daemon.status()["ready"]["pid"] == worker, "its worker has ended"


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    reference = st.sampled_from([{"$ref": "#"}, {"$ref": "#/$defs/0"}, {"$ref": "#/$defs/1"}, {"$ref": "#/$defs/9"}])
    leaf = st.one_of(
        reference,
        st.sampled_from([{"type": name} for name in ("string", "integer", "number", "boolean", "null")]),
        st.builds(lambda pattern: {"type": "string", "pattern": pattern}, st.sampled_from(PATTERNS)),
        st.builds(
            lambda least, most: {"type": "string", "minLength": least, "maxLength": most}, *[st.integers(0, 9)] * 2
        ),
        st.sampled_from([True, False, {}, {"enum": []}, {"enum": ["a", 1, None]}, {"const": {"a": [1]}}]),
    )

    names = st.sampled_from([
        *({"enum": list(NAMES)}, {"const": "a"}, {"enum": [*NAMES, 1, "a"]}, {"$ref": "#/$defs/0"}),
        *({"type": "string", "pattern": pattern} for pattern in PATTERNS),
    ])  # fmt: skip

    def extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        some = st.lists(inner, min_size=1, max_size=3)
        return st.one_of(
            st.builds(
                lambda values, required, least: {
                    "type": "object",
                    "properties": values,
                    "required": required,
                    "minProperties": least,
                },
                st.dictionaries(st.sampled_from(NAMES), inner),
                st.lists(st.sampled_from(NAMES), unique=True),
                st.integers(0, 2),
            ),
            st.builds(lambda one, least: {"type": "array", "items": one, "minItems": least}, inner, st.integers(0, 3)),
            st.builds(lambda few, one: {"type": "array", "prefixItems": few, "items": one, "minItems": 1}, some, inner),
            st.builds(lambda key, few: {key: few}, st.sampled_from(["allOf", "anyOf", "oneOf"]), some),
            st.builds(lambda one: {"type": "object", "additionalProperties": one, "minProperties": 1}, inner),
            st.builds(
                lambda names, one, depth: nest(one, depth, "additionalProperties", {"propertyNames": names}),
                names,
                inner,
                st.integers(1, 40),
            ),
            st.builds(nest, inner, st.integers(1, 90)),
        )

    each = st.recursive(leaf, extend, max_leaves=8)
    return st.builds(with_definitions, each, each, each)


def nest(schema: Any, depth: int, key: str = "items", beside: Mapping[str, Any] = MappingProxyType({})) -> Any:
    for _ in range(depth):
        schema = {**beside, key: schema}
    return schema


def with_definitions(root: Any, one: Any, two: Any) -> dict[str, Any]:
    return (root if isinstance(root, dict) else {"allOf": [root]}) | {"$defs": {"0": one, "1": two}}


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@example(DEADLY["references through items"])
@example(DEADLY["patterns"])
@example(DEADLY["allOf"])
@example(UNSATISFIABLE["a required property"])
@example(nest_names(["a", "b"], 40))
@given(schema=schemas())
def test_schemas_of_any_kind_are_answered_or_refused(toy, schema):
    named = {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}}
    answer = toy.check({"prompt": "x", "response_format": named})
    if answer.status_code == 400:
        error = answer.json()["error"]
        in_the_middle = error["message"].startswith("the grammar failed: ")
        # It nests deeper than a body may, or a starved machine needs the whole time for it.
        as_a_whole = error["code"] in ("invalid_json", "body_too_slow")
        assert error["param"] == (None if in_the_middle or as_a_whole else "response_format"), error


LOOPS = (
    "{% set words = messages[0].content.split() %}{% set first = words[0] | default('') | int %}"
    "{% set second = words[1] | default('') | int %}"
    "{% macro again(left) %}{% if left > 0 %}{{ again(left - 1) }}{% endif %}{% endmacro %}"
    "{% if 'loop' in words %}{% for a in range(first) %}{% for b in range(second) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if 'power' in words %}{{ (first ** second) > 0 }}{% endif %}"
    "{% if 'text' in words %}{{ 'x' * first * second }}{% endif %}"
    "{% if 'list' in words %}{{ ([0] * first * second) | length }}{% endif %}"
    "{% if 'macro' in words %}{{ again(first) }}{% endif %}"
    "{% if 'fill' in words %}{{ messages | tojson(indent=first) }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
)
ENDLESS = "99999 99999 loop"


def write_templated(directory: Path, store: Path) -> Path:
    """Write a configuration over a small model whose chat template does what a message asks for."""
    config = write_tiny(directory, store)
    (directory / "tiny" / "chat_template.jinja").write_text(LOOPS)
    config.write_text(
        config.read_text().replace("limits: {", f"drafts: []\nlimits: {{translation_timeout_s: {BOUND_S}, ")
    )
    return config


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory, shared_store: Path) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("templates")
    with running(write_templated(directory, shared_store)) as daemon, watching(daemon) as watched:
        yield watched


def words() -> st.SearchStrategy[str]:
    numbers = st.sampled_from([0, 1, 3, 40, 2_000, 90_000, 10**7, 10**12])
    told = st.sampled_from(["loop", "power", "text", "list", "macro", "fill", "plain"])
    return st.builds(lambda first, second, what: f"{first} {second} {what}", numbers, numbers, told)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@example(ENDLESS)
@example("1000000000000 1 text")
@example("99999 1 macro")
@given(content=words())
def test_templates_of_any_kind_end_in_time(templated, content):
    templated.check({"messages": [{"role": "user", "content": content}]})


def test_a_template_that_was_ended_leaves_nothing_that_uses_a_core(templated):
    answer = templated.check({"messages": [{"role": "user", "content": ENDLESS}]})
    assert answer.status_code == 400
    assert "chat template takes longer than 2 s" in answer.json()["error"]["message"]
    family = [psutil.Process(templated.daemon.process.pid)]
    family += family[0].children(recursive=True)
    before_s = {one.pid: spent for one in family if (spent := measure_spent_s(one)) is not None}
    time.sleep(1.0)
    after_s = [(one.pid, spent) for one in family if (spent := measure_spent_s(one)) is not None]
    assert sum(spent - before_s.get(pid, 0.0) for pid, spent in after_s) < 0.5


def measure_spent_s(process: psutil.Process) -> float | None:
    """What it has used of a core; None where it has ended."""
    with suppress(psutil.NoSuchProcess):
        return float(sum(process.cpu_times()[:2]))
    return None


def find_in_hand(directory: Path) -> bytes:
    """The notes of bodies that the daemon reads now."""
    return b"".join(path.read_bytes().strip(b"\0") for path in directory.glob("state/**/in-hand"))


def stays_in_hand(directory: Path) -> bool:
    """Whether the daemon has been at one body for long: the others take milliseconds."""
    body = find_in_hand(directory)
    time.sleep(0.5)
    return bool(body) and find_in_hand(directory) == body


def test_a_batch_goes_on_past_a_line_at_which_the_daemon_died_twice(tmp_path, shared_store):
    config = write_templated(tmp_path, shared_store)
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": content}]},
        }
        for name, content in (("first", "a"), ("deadly", ENDLESS), ("third", "b"), ("fourth", "c"))
    ]
    batch_id = ""
    for _ in range(2):
        with running(config) as daemon:
            batch_id = batch_id or create(daemon.client, upload(daemon.client, lines), "/v1/chat/completions")
            # It hangs in the template for two seconds: that the daemon dies just then is its doing.
            until(lambda: stays_in_hand(tmp_path), 60.0)
            daemon.kill()
    with running(config) as daemon:
        batch = wait_for_end(daemon.client, batch_id)
        assert batch.status == "completed"
        assert (batch.request_counts.completed, batch.request_counts.failed) == (3, 1)
        (failed,) = lines_in(daemon.client, batch.error_file_id)
        assert (failed["custom_id"], failed["response"]["status_code"]) == ("deadly", 422)
        assert failed["error"]["code"] == "request_quarantined"
        assert sorted(one["custom_id"] for one in lines_in(daemon.client, batch.output_file_id)) == [
            *("first", "fourth", "third")
        ]
        (held,) = json.loads(outrider_process("quarantine", "list", "--json", "--socket", str(daemon.admin)).stdout)[
            "quarantined"
        ]
        assert (held["deaths"], "daemon itself" in held["cause"]) == (2, True)
        assert (
            'outrider_quarantined_requests{engine="0",model_name="tiny"} 1.0' in httpx.get(f"{daemon.url}/metrics").text
        )
        with httpx.Client(base_url=daemon.url, timeout=60.0) as client:
            released = outrider_process("quarantine", "release", held["digest"], "--socket", str(daemon.admin))
            assert released.returncode == 0, released.stderr
            answer = client.post("/v1/chat/completions", json=lines[1]["body"])
            assert answer.status_code == 400, "it is read again, and only too slow"
    assert not find_in_hand(tmp_path)
