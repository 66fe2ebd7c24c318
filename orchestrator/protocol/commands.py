"""Commands: what a worker is told. They travel as MessagePack (see `frames`); either side's contract is in `contract`.

History is the truth: a `Submit` has the prompt *and* the tokens already committed, so that a new worker continues a
stream where the old one left it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from orchestrator.protocol.draft_messages import AttachDraft, ChooseDrafters
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.trace_messages import TraceContext
from policies.sampling import Sampling


class Grammar(msgspec.Struct, frozen=True):
    """What an output must be."""

    kind: Literal["json_schema", "regex", "lark"]
    """"lark" is llguidance's notation, in which a JSON schema is written `%json {...}`."""
    text: str


class SharedMemory(msgspec.Struct, frozen=True):
    """Memory that the daemon has made for one sequence's pages."""

    path: str
    """Opens it while the daemon keeps it."""
    name: str
    """Tells that it is still the same."""
    most_bytes: int
    """So many may be written to it."""


class PageLink(msgspec.Struct, frozen=True):
    """Where pages of one sequence are to be sent while it is decoded: to a worker on another host."""

    endpoint: LinkEndpoint
    most_bytes: int
    within_s: float
    """They are sent for this long at most."""


class KvPages(msgspec.Struct, frozen=True):
    """The KV cache of a sequence's first positions, in shared memory or on its way to the next worker."""

    memory: SharedMemory
    format: str
    """As `ReadyKv.format`."""
    positions: int
    length_bytes: int
    checksum: str
    """Of the tokens that the pages belong to; in shared memory of the pages and of their order too."""
    transfer: str = ""
    """The name under which they are sent; "": they are not."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Decode from `prompt + committed` to a stop token, or what ends a grammar, or `max_tokens`. Journals keep it."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    """Committed ones included. 0 only reads the prompt."""
    sampling: Sampling = Sampling()
    committed: list[int] = []
    stop_tokens: list[int] = []
    depth: int | None = None
    """None lets the policy choose, 0 switches every drafter off, k fixes it."""
    timeout_s: float = 0.0
    """Of the whole request, its waiting included; 0 is no bound. Control keeps it, workers do not look at it."""
    min_tokens: int = 0
    """No stop token is chosen before so many tokens."""
    logprobs: int | None = None
    """Score each token, and so many of the likeliest."""
    prompt_logprobs: bool = False
    grammar: Grammar | None = None
    route: str = ""
    """With `user` the class in which its acceptance is watched."""
    user: str = ""
    """The request's tag."""
    most_depth: int | None = None
    """The policy chooses no deeper."""
    policy_depth: bool = False
    """The policy is to choose, whatever the overrides of session and engine. Control makes a depth or a bound of all
    overrides."""
    variant: str = ""
    """The canary's variant that serves it ("canary"; any other: the control)."""
    owner: str = ""
    """Whose request it is, for the fair order of those that wait."""
    pages: KvPages | None = None
    """What an earlier worker computed of it. Where they are of no use it is computed again."""
    recalled: list[bytes] = []
    """Earlier answers to prompts like this one, as of packed_tokens, to draft from."""
    prediction: bytes = b""
    """What its client expects of its output, in the same form; b"": nothing."""
    stores: list[str] | None = None
    """The stores of documents that it may be drafted from; None: all."""
    trace: TraceContext | None = None
    """Where its spans belong; None where it is not traced."""
    model_digest: str = ""
    """Of the model that its prompt was translated for, as `ReadyModel.digest`; "": of any."""
    vocabulary: str = ""
    """As `ReadyModel.vocabulary_fingerprint`; "": of any."""
    group: str = ""
    """Only replicas of this group of equal bits may serve it; "": any may."""
    lora: str = ""
    """The name of the LoRA adapter that it is computed with; "": none."""
    committed_group: str = ""
    """The group that its committed tokens are of; "": not known."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Forget a request; its slot is free within one round. No further event for it follows the next round."""

    request_id: str


class MoveOut(msgspec.Struct, frozen=True, tag="move_out"):
    """Forget a request behind the current round, and before that write its KV cache to this memory. `MovedOut` is the
    last that the worker says of it."""

    request_id: str
    memory: SharedMemory
    link: PageLink | None = None
    """It is sent there instead, and the request is forgotten once little of it is left to send."""


class CountAsOurs(msgspec.Struct, frozen=True, tag="count_as_ours"):
    """To an agent: what these processes take is not others' load."""

    pids: list[int]
    """Our workers', on whichever host."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the worker process, running requests included."""


class Retune(msgspec.Struct, frozen=True, tag="retune"):
    """Decode by other options from now on; the model and how it is loaded are as before. What runs goes on. `Retuned`
    is the answer."""

    options: dict[str, Any]
    """Those of the worker's entry."""


Command = Submit | Cancel | MoveOut | Stop | AttachDraft | ChooseDrafters | CountAsOurs | Retune
