"""The sandbox with real processes: what crashes, hangs or fills memory ends a child, and never the one who asks."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from adapters.chat_template import ChatTemplate, TemplateEnded, TemplateError
from orchestrator.daemon.sandbox import sandbox as sandbox_module
from orchestrator.daemon.sandbox.jobs import send_job
from orchestrator.daemon.sandbox.sandbox import JobEnded, Sandbox, SandboxedTemplate
from orchestrator.errors import RequestError
from tests.support.untrusted import DEADLY
from tests.support.waiting import until

GOOD = ("json_schema", '{"type": "string"}')
ASKED: Any = [{"role": "user", "content": "half a pair \ud83d"}]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
WITHIN_S = 60.0
BOS = "<s>"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    found = Sandbox()
    yield found
    found.close()


def list_family() -> list[psutil.Process]:
    """The processes of sandboxes that this one has started."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if "orchestrator.daemon.sandbox.nursery" in one.cmdline():
                found.append(one)
    return found


def is_busy(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.cpu_percent(0.2) > 50.0)
    return False


def measure_largest() -> int:
    """How much memory the largest of them has."""
    sizes = [0]
    for one in list_family():
        with suppress(psutil.Error):
            sizes.append(one.memory_info().rss)
    return max(sizes)


def render(sandbox: Sandbox, source: str) -> str:
    template = SandboxedTemplate(ChatTemplate(source, bos_token=BOS, eos_token=""), sandbox)
    return template.render(ASKED, add_generation_prompt=True)


@pytest.mark.parametrize("schema", DEADLY.values(), ids=DEADLY)
def test_what_ends_its_process_ends_no_other_and_the_next_job_is_done(sandbox, schema):
    began_s = time.monotonic()
    with pytest.raises(JobEnded) as ended:
        sandbox.do("grammar", ("json_schema", json.dumps(schema)), 3.0)
    assert time.monotonic() - began_s < 3.0 * 2 + WITHIN_S / 6
    assert sandbox.do("grammar", GOOD, WITHIN_S) == ""
    # Ended, not left at it.
    busy = [one for one in list_family() if is_busy(one)]
    assert not busy, (ended.value.too_slow, busy)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (LOOP, "longer than 1 s"),
        ("{{ 'a' * 10 ** 10 }}", "memory"),
        ("{{ ('a' * 10 ** 7) | replace('a', 'b' * 100) }}", "memory"),
        ("{% set x = namespace(a='a') %}{% for i in range(99) %}{% set x.a = x.a + x.a %}{% endfor %}", "memory"),
        ("{{ 'a' * 3 * 10 ** 7 }}", "characters"),
        ("{{ [0] * 10 ** 9 }}", "memory"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ messages | tojson(indent=10 ** 9) }}", "memory"),
    ],
)
def test_a_template_that_does_not_end_by_itself_is_ended(sandbox, source, says):
    sandbox.template_timeout_s = 1.0 if source is LOOP else WITHIN_S
    with pytest.raises(TemplateError, match=says):
        render(sandbox, source)
    sandbox.template_timeout_s = WITHIN_S
    assert render(sandbox, "{{ bos_token }}{{ messages[0].content }}") == BOS + ASKED[0]["content"]


def test_a_template_is_rendered_as_it_is_here(sandbox):
    template = ChatTemplate(
        "{{ tools | tojson }}{% if 'tools' and '<tool_call>' %}x{% endif %}", bos_token="", eos_token=""
    )
    boxed = SandboxedTemplate(template, sandbox)
    named: Any = {"add_generation_prompt": False, "tools": [{"name": "é\ud83d", "n": 10**400}]}
    assert boxed.render(ASKED, **named) == template.render(ASKED, **named)
    assert boxed.takes_tools == template.takes_tools is True


def test_threads_have_a_child_each_and_memory_that_was_taken_is_given_back(sandbox):
    large = {"enum": [f"value {number}" for number in range(30_000)]}
    found: list[str] = []
    schemas = [json.dumps(large | {"title": str(number)}) for number in range(4)]
    threads = [
        threading.Thread(target=lambda text=text: found.append(sandbox.do("grammar", ("json_schema", text), WITHIN_S)))
        for text in schemas
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found == [""] * 4
    until(lambda: measure_largest() < 72 << 20, WITHIN_S)


def test_a_nursery_that_was_killed_is_replaced():
    sandbox = Sandbox()
    assert sandbox.do("grammar", GOOD, WITHIN_S) == ""
    assert sandbox._nursery is not None
    os.kill(sandbox._nursery._process.pid, signal.SIGKILL)
    assert sandbox.do("grammar", GOOD, WITHIN_S) == ""
    mine = {sandbox._nursery._process.pid}
    mine |= {one.pid for one in psutil.Process(*mine).children()}
    sandbox.close()
    sandbox.close()
    until(lambda: not mine & {one.pid for one in list_family()}, WITHIN_S)


_ASKING = f"""
import os, sys, time
kept = os.open({str(Path(__file__))!r}, os.O_RDONLY); os.set_inheritable(kept, True)
from orchestrator.daemon.sandbox.sandbox import Sandbox
from orchestrator.daemon.sandbox.sandbox import SandboxedTemplate
from adapters.chat_template import ChatTemplate
sandbox = Sandbox(600.0)
assert sandbox.do("grammar", {GOOD!r}, 60.0) == ""
print("ready", flush=True)
SandboxedTemplate(ChatTemplate({LOOP!r}, bos_token="", eos_token=""), sandbox).render([], add_generation_prompt=True)
"""


def test_children_have_nothing_of_the_daemon_and_die_with_it_whatever_they_do():
    environment = os.environ | {"OUTRIDER_API_KEY": "secret", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", _ASKING], env=environment, stdout=subprocess.PIPE) as daemon:
        try:
            assert daemon.stdout is not None
            assert daemon.stdout.readline() == b"ready\n"
            family = psutil.Process(daemon.pid).children(recursive=True)
            assert len(family) >= 2
            until(lambda: any(one.cpu_times().user > 0.3 for one in family), WITHIN_S)  # one of them loops
            for one in family:
                assert "OUTRIDER_API_KEY" not in one.environ()
                allowed = ["socket:"]
                opened = {link.name: os.readlink(link) for link in Path(f"/proc/{one.pid}/fd").iterdir()}
                if one.ppid() == daemon.pid:
                    del opened["2"]  # where it says why it cannot start
                    allowed += ["pipe:", "anon_inode:[pidfd]"]  # of its children
                assert all(name.startswith(("/dev/null", *allowed)) for name in opened.values()), opened
        finally:
            daemon.kill()
    _, alive = psutil.wait_procs(family, WITHIN_S)
    assert not alive


LONG = "{% for a in range(12000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}done"


class Meddler(threading.Thread):
    """Does something to each process of this sandbox that works, so many times."""

    def __init__(self, sandbox: Sandbox, times: int, meddle: Callable[[psutil.Process], None]) -> None:
        super().__init__(daemon=True)
        self.sandbox, self.left, self.meddle = sandbox, times, meddle
        self.over = threading.Event()

    def run(self) -> None:
        met: set[int] = set()
        while self.left and not self.over.wait(0.01):
            assert self.sandbox._nursery is not None
            for one in psutil.Process(self.sandbox._nursery._process.pid).children():
                with suppress(psutil.Error):
                    if one.pid not in met and one.cpu_times().user > 0.15 and self.left:
                        met.add(one.pid)
                        self.left -= 1
                        self.meddle(one)


@contextmanager
def meddling(times: int, meddle: Callable[[psutil.Process], None]) -> Iterator[Sandbox]:
    sandbox = Sandbox(WITHIN_S)
    sandbox.do("grammar", GOOD, WITHIN_S)
    meddler = Meddler(sandbox, times, meddle)
    meddler.start()
    try:
        yield sandbox
        assert meddler.left < times, "nothing was done to it"
    finally:
        meddler.over.set()
        meddler.join()
        sandbox.close()


@pytest.mark.parametrize(
    "meddle",
    [psutil.Process.kill, psutil.Process.terminate, lambda child: child.parent().kill()],
    ids=["the child is killed", "it is asked to end", "the nursery is killed"],
)
def test_what_others_end_is_done_in_another_child(meddle):
    with meddling(1, meddle) as sandbox:
        assert render(sandbox, LONG) == "done"


@pytest.mark.parametrize(
    ("times", "meddle", "timeout_s"),
    [(99, psutil.Process.kill, WITHIN_S), (1, psutil.Process.suspend, 3.0)],
    ids=["each child is killed", "the child is frozen"],
)
def test_what_others_do_again_and_again_is_not_the_jobs_fault(times, meddle, timeout_s):
    with meddling(times, meddle) as sandbox:
        sandbox.template_timeout_s = timeout_s
        source = LONG if times > 1 else LOOP
        began_s = time.monotonic()
        with pytest.raises(RequestError, match="send it again") as away:
            render(sandbox, source)
        assert (away.value.status, away.value.code) == (503, "sandbox_away")
        assert time.monotonic() - began_s < WITHIN_S / 2
        sandbox.template_timeout_s = WITHIN_S
        assert render(sandbox, "fine") == "fine"


@pytest.mark.parametrize("name", ["references", "references through items"])
def test_what_ends_its_child_by_itself_is_told_apart_from_a_kill_and_tried_twice(sandbox, name):
    with pytest.raises(JobEnded) as ended:
        sandbox.do("grammar", ("json_schema", json.dumps(DEADLY[name])), WITHIN_S)
    assert (ended.value.too_slow, ended.value.ends) == (False, 2)


class Unpicklable:
    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [RecursionError, MemoryError, KeyboardInterrupt])
def test_a_job_that_cannot_be_sent_leaves_no_process_and_no_descriptor(error):
    sandbox = Sandbox()
    sandbox.do("grammar", GOOD, WITHIN_S)
    assert sandbox._nursery is not None
    nursery, before = psutil.Process(sandbox._nursery._process.pid), len(os.listdir("/proc/self/fd"))
    for _ in range(4):
        with pytest.raises(error):
            sandbox.do("grammar", ("json_schema", Unpicklable(error)), WITHIN_S)
    until(lambda: not nursery.children(), WITHIN_S)
    assert len(os.listdir("/proc/self/fd")) < before
    assert sandbox.do("grammar", GOOD, WITHIN_S) == ""
    sandbox.close()


def test_a_job_that_takes_too_long_is_told_where_the_nursery_stands_still(sandbox):
    assert render(sandbox, "fine") == "fine"  # its child is used again
    assert sandbox._nursery is not None
    nursery = psutil.Process(sandbox._nursery._process.pid)
    sandbox.template_timeout_s = 1.0
    nursery.suspend()
    try:
        with pytest.raises(TemplateEnded, match="takes longer than 1 s"):
            render(sandbox, LOOP)
    finally:
        nursery.resume()


def test_a_child_ends_itself_where_the_daemon_stands_still(sandbox):
    child = sandbox._fork()
    pickled = pickle.dumps(ChatTemplate(LOOP, bos_token="", eos_token=""))
    send_job(child.link, ("template", (pickled, (ASKED,), {"add_generation_prompt": True}), 0.2))
    assert child.link.recv(1) == b""
    child.release()


def test_a_child_that_comes_when_the_sandbox_is_closed_is_let_go(monkeypatch):
    forked, closed = threading.Event(), threading.Event()
    children = []

    def fork(self):
        child = sandbox_module._Nursery.fork(self._nursery)
        children.append(child)
        forked.set()
        assert closed.wait(WITHIN_S)
        return child

    late = Sandbox()
    late._fork().release()
    monkeypatch.setattr(Sandbox, "_fork", fork)
    late.start()
    assert forked.wait(WITHIN_S)
    late.close()
    closed.set()
    until(lambda: children[0].link.fileno() == -1, WITHIN_S)


def test_a_nursery_that_starts_when_the_sandbox_is_closed_ends(monkeypatch):
    late, nurseries = Sandbox(), []

    class Nursery(sandbox_module._Nursery):
        def __init__(self):
            super().__init__()
            nurseries.append(self)
            late.close()

    monkeypatch.setattr(sandbox_module, "_Nursery", Nursery)
    with pytest.raises(RequestError, match="cannot be started"):
        late.do("grammar", GOOD, WITHIN_S)
    (nursery,) = nurseries
    assert nursery._process.poll() is not None
    assert nursery._link.fileno() == -1


def test_a_bug_is_no_problem_of_the_text(sandbox):
    with pytest.raises(RuntimeError, match="TypeError"):
        sandbox.do("grammar", ("regex", 7), WITHIN_S)


@pytest.mark.parametrize("unread", [False, True], ids=["closed", "reset"])
def test_a_nursery_whose_daemon_ends_at_once_ends_without_a_word(unread):
    """A daemon that cannot listen ends before its nursery is ready, and says why in one line."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "orchestrator.daemon.sandbox.nursery", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
        if unread:
            theirs.send(b"what nobody reads resets the link")
    if unread:
        assert select.select([ours], [], [], 60.0)[0]
    ours.close()
    assert process.communicate(timeout=60.0)[1] == ""
    assert process.returncode == 0
