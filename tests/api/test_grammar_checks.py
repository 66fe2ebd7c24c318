"""What is remembered of grammars: what they are for good, and what ended their children for a while."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

from orchestrator.daemon.api import translate
from orchestrator.daemon.api.conversation import Message
from orchestrator.daemon.api.grammar_checks import GrammarChecks
from orchestrator.daemon.sandbox.sandbox import Sandbox
from orchestrator.errors import RequestError
from orchestrator.protocol.commands import Grammar
from tests.api.support import HandClock
from tests.api.test_untrusted_schemas import Templated
from tests.support.untrusted import DEADLY

WITHIN_S = 30.0
ANY_BYTES = 1 << 20
SOUND = {"type": "object", "properties": {"q": {"type": "string"}}}
SLOW = {"type": "object", "patternProperties": {f"^x{number}[a-z]+$": {"type": "null"} for number in range(900)}}


class Checked:
    """Checks with a sandbox and a clock of their own."""

    def __init__(self, timeout_s: float) -> None:
        self.sandbox = Sandbox()
        self.clock = HandClock()
        self.checks = GrammarChecks(ANY_BYTES, timeout_s, self.sandbox, self.clock)
        self.sandbox.do("grammar", ("regex", "a"), WITHIN_S)

    def ask(self, schema: dict[str, Any]) -> int:
        """Return the status that a request gets."""
        try:
            asyncio.run(self.checks.check(Grammar("json_schema", json.dumps(schema)), "response_format"))
        except RequestError as error:
            return error.status
        return 200

    def suspend_children(self) -> None:
        assert self.sandbox._nursery is not None
        for one in psutil.Process(self.sandbox._nursery._process.pid).children():
            with suppress(psutil.Error):
                one.suspend()


@pytest.fixture
def quick() -> Iterator[Checked]:
    found = Checked(2.0)
    yield found
    found.sandbox.close()


def test_a_machine_that_stood_still_is_not_the_schemas_fault(quick):
    quick.suspend_children()
    assert quick.ask(SOUND) == 503
    assert quick.ask(SOUND) == 200


@pytest.mark.parametrize(("schema", "asks"), [(DEADLY["references"], 1), (SLOW, 2)], ids=["memory", "time"])
def test_a_grammar_that_ended_two_children_is_refused_for_a_minute_without_a_third(quick, schema, asks):
    for _ in range(asks):
        assert quick.ask(schema) == 400
    quick.sandbox.close()  # from here on nothing can be tried
    assert quick.ask(schema) == 400
    quick.clock.now_s += 59.0
    assert quick.ask(schema) == 400
    quick.clock.now_s += 2.0
    assert quick.ask(schema) == 503, "it is tried again"


def test_one_end_for_want_of_time_proves_nothing(quick):
    assert quick.ask(SLOW) == 400
    quick.sandbox.close()
    assert quick.ask(SLOW) == 503


def test_what_is_well_formed_is_remembered_for_good(quick):
    assert quick.ask(SOUND) == 200
    assert quick.ask({"type": "nonsense"}) == 400
    quick.sandbox.close()
    quick.clock.now_s += 9999.0
    assert (quick.ask(SOUND), quick.ask({"type": "nonsense"})) == (200, 400)


LONG = "{% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
LONG += "{% for a in range(20000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("timeout_s", [0.2, 0.3])
def test_a_template_that_was_ended_once_is_not_at_fault_for_ever(timeout_s):
    sandbox = Sandbox()
    try:
        sandbox.do("grammar", ("regex", "a"), WITHIN_S)
        tokenizer = Templated(LONG, sandbox)
        for content, says in (("no", "the chat template refuses these messages: not this"), ("hi", "takes longer")):
            sandbox.template_timeout_s = timeout_s
            with pytest.raises(RequestError) as refused:
                translate.chat_prompt([Message(role="user", content=content)], tokenizer)
            assert says in refused.value.message
            assert "itself is at fault" not in refused.value.message
        sandbox.template_timeout_s = WITHIN_S
        assert tokenizer.template_fault == ""
        sandbox.close()
        assert tokenizer.template_fault == "", "it is found out, and kept"
    finally:
        sandbox.close()
