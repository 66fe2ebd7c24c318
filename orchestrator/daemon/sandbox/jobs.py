"""What a child of the sandbox is asked, and what it answers. It trusts its daemon; the daemon believes only text."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache
from typing import Any, Final

from adapters.chat_template import ChatTemplate, TemplateError
from adapters.framing import ANY_BYTES, ProtocolError, add_header, receive_frame
from adapters.grammar_check import find_grammar_problem, warm_up

MEMORY_BYTES: Final = {"grammar": 64 << 20, "template": 128 << 20}
"""What a job may take beyond what its child began with. The largest schemas of use take 20 MiB, and a worker remembers
what it has compiled."""
NEVER_BEGAN: Final = 1
"""The status of a child that could not begin, or has no nursery."""
_HEAD_BYTES: Final = 2  # of an answer: its status, and whether it was the last
_MOST_WORDS: Final = 1000  # characters of a reason
_TEMPLATES: Final = 8  # of all models, compiled. Bounds memory.
_TEMPLATE_SPARE: Final = 1 << 20  # of characters, beside what messages bring
# The messages may be written so many times as long: indented, or more than once. ADR 0099.
_TEMPLATE_TIMES: Final = 16

Job = tuple[str, tuple[Any, ...], float]
"""The name of what is to be done (in _WORK), with what, and within how many seconds."""


class Status(IntEnum):
    """How a job ended that its child outlived."""

    DONE = 0
    REFUSED = 1  # the text says why
    MEMORY = 2  # or stack
    FAILED = 3  # by a bug; the text says which


def do(job: Job) -> tuple[Status, str]:
    """Do a job, in a child."""
    name, arguments, _ = job
    try:
        return Status.DONE, _WORK[name](*arguments)
    except TemplateError as error:
        if isinstance(error.__cause__, MemoryError):
            return Status.MEMORY, ""
        return Status.REFUSED, str(error)[:_MOST_WORDS]
    except (MemoryError, RecursionError):
        return Status.MEMORY, ""
    except Exception as error:
        return Status.FAILED, f"{type(error).__name__}: {error}"[:_MOST_WORDS]


def prepare() -> None:
    """Do once what every first job would do, before children are made."""
    warm_up()
    template = ChatTemplate("{% for one in messages %}{{ one | tojson }}{% endfor %}", bos_token="", eos_token="")
    _render(pickle.dumps(template), ([{"role": "user", "content": "x"}],), {"add_generation_prompt": True})


def _render(pickled: bytes, arguments: tuple[Any, ...], named: dict[str, Any]) -> str:
    text = _load_template(pickled).render(*arguments, **named)
    bound = _TEMPLATE_SPARE + _TEMPLATE_TIMES * len(pickle.dumps((arguments, named)))
    if len(text) > bound:
        raise TemplateError(f"the model's chat template made {len(text)} characters of messages this size")
    return text


@lru_cache(_TEMPLATES)
def _load_template(pickled: bytes) -> ChatTemplate:
    template = pickle.loads(pickled)  # noqa: S301 -- from the daemon
    assert isinstance(template, ChatTemplate)  # noqa: S101
    return template


_WORK: Final[dict[str, Callable[..., str]]] = {"grammar": find_grammar_problem, "template": _render}


def send_job(link: socket.socket, job: Job) -> None:
    """Ask a child. Raises OSError."""
    link.sendall(add_header(pickle.dumps(job)))


def receive_job(link: socket.socket) -> Job:
    """Wait for a job, in a child. Raises OSError."""
    job: Job = pickle.loads(receive_frame(link, ANY_BYTES))  # noqa: S301 -- from the daemon
    return job


def send_result(link: socket.socket, status: Status, text: str, *, last: bool) -> None:
    """Answer, in a child, and say whether it is its last answer. Raises OSError."""
    link.sendall(add_header(bytes([status, last]) + text.encode("utf-8", "surrogatepass")))


def receive_result(link: socket.socket, most_bytes: int) -> tuple[Status, str, bool]:
    """Return what a child answers, and whether it was its last answer. Raises OSError where it answers no more, and
    ProtocolError where it says too much, or what is no answer."""
    data = receive_frame(link, most_bytes)
    try:
        return Status(data[0]), data[_HEAD_BYTES:].decode("utf-8", "surrogatepass"), bool(data[1])
    except (ValueError, IndexError) as error:
        raise ProtocolError("a child's answer has no status") from error
