"""What a comparison asks of an engine: a small contract, and its answers as plain values that cross a process boundary.

An engine is loaded by `load(options) -> PeerEngine` of its module, in a process of its own. Times are seconds from the
call; tokens are ids of the model's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from adapters.contract import AdapterError

NATIVE = "built natively"
"""Of what is effective: whether an engine's code is for this machine's processor, a text that begins with yes or no."""


class EngineMissing(AdapterError):
    """The engine, or what it loads, is not on this machine; the message says how to get it."""


class NotOffered(AdapterError):
    """The engine does not do what was asked; the message says what it lacks."""


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """How to load an engine. `source`: a GGUF file or a Hugging Face directory. `tokenizer`: the prepared one. `work`:
    where conversions are kept. `directory`: the model in the engine's own form, where the user gave it. `draft`: a GGUF
    file or directory of a draft model, "" for none. `at_once`: the most sequences together."""

    mode: str
    source: str
    tokenizer: str
    work: str
    threads: int
    directory: str = ""
    draft: str = ""
    at_once: int = 1
    kv_cache_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class PeerPrompt:
    """One prompt: its text as a user writes it, and its tokens as the chat template makes them."""

    text: str
    tokens: list[int]
    stop_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request gave. `steps`: forwards of the target that made its tokens, `drafted` and `accepted`: its draft
    tokens; each None where the engine does not tell. `count`: how many tokens there are, where `tokens` are encoded
    from the text, which may take more or fewer."""

    tokens: list[int]
    first_s: float
    last_s: float
    steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    count: int | None = None

    @property
    def generated(self) -> int:
        return len(self.tokens) if self.count is None else self.count


@dataclass(frozen=True, slots=True)
class Score:
    """What an engine thinks of a text: the log-probability of each token behind the first, and, where logits are
    exposed, the token that it would have chosen there."""

    log_probabilities: list[float]
    choices: list[int] | None = None


class PeerEngine(Protocol):
    """A loaded engine. Calls raise NotOffered for what it does not do; anything else that is raised is a failure."""

    def describe(self) -> dict[str, str]:
        """Return what is effective: `version`, `weights`, `activations`, `kv_cache`, `threads`, and what else tells."""
        ...

    def generate(self, prompt: PeerPrompt, max_tokens: int) -> Answer:
        """Decode one prompt greedily; a stop token ends the answer and is its last token."""
        ...

    def generate_many(self, prompts: Sequence[PeerPrompt], max_tokens: int) -> list[Answer]:
        """Decode several prompts together; `last_s` of each is when it ended."""
        ...

    def score(self, tokens: Sequence[int]) -> Score:
        """Read a text, teacher-forced."""
        ...

    def forget(self) -> None:
        """Drop what is remembered of earlier requests, so that none of it drafts for later ones."""
        return

    def close(self) -> None:
        """End what the engine started."""
        return


_listeners: list[Callable[[str], None]] = []


def listen(listener: Callable[[str], None]) -> None:
    """Let `listener` hear what takes long in this process while an engine is loaded."""
    _listeners.append(listener)


def announce(what: str) -> None:
    for one in _listeners:
        one(what)


def parse_directory(options: PeerOptions) -> Path | None:
    """Return the directory that the user gave, None for none. Raises EngineMissing where it is not there."""
    if not options.directory:
        return None
    if not (found := Path(options.directory)).is_dir():
        raise EngineMissing(f"{options.directory}: there is no such directory")
    return found
