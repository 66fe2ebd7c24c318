"""What goes wrong, as types. Every message is one line for a person and names the way out.

OutriderError
+-- ConfigError          cluster.yaml is wrong; the message begins with file:line
+-- WorkerError
|   +-- WorkerLost       the worker process ended or stopped answering
|   +-- WorkerStartFailed  it never became ready
|   +-- ClusterAway      the cluster, or the host asked for, is not there now: no fault of the worker's
+-- DaemonError          the daemon cannot start
+-- RequestError         a request that cannot be served; has an HTTP status and OpenAI's error fields
    +-- ContextExceeded  it does not fit the model's context
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.redaction import redact_secrets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from policies.serving.failover.blame import LossKind


CONTEXT_EXCEEDED = "context_length_exceeded"


class OutriderError(Exception):
    """Root of Outrider's own errors."""


class ConfigError(OutriderError):
    """The configuration is wrong; the message begins with file:line and ends with the way out. It has no secret in it,
    and nothing that a terminal would obey."""

    def __init__(self, message: str) -> None:
        super().__init__(escape(redact_secrets(message)))


def escape(text: str) -> str:
    """Return a text whose characters can all be printed, line breaks aside."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(one if one == "\n" or one.isprintable() else repr(one)[1:-1] for one in text)


class WorkerError(OutriderError):
    """Something is wrong with a worker process. `kind` is one of policies.serving.failover.blame.LossKind."""

    kind: LossKind = "crashed"


class WorkerLost(WorkerError):
    """The worker process ended or stopped answering."""

    def __init__(self, message: str, kind: LossKind = "crashed") -> None:
        super().__init__(message)
        self.kind = kind


class WorkerStartFailed(WorkerError):
    """The worker process never became ready."""


class ClusterAway(WorkerError):
    """No worker can be started now, as the cluster or the host asked for is away; this may be over without us."""

    kind: LossKind = "host"


class DaemonError(OutriderError):
    """The daemon cannot start, or its model failed before it served."""


_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}  # OpenAI's, by status


class RequestError(OutriderError):
    """A request that cannot be served, with the fields of OpenAI's error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.headers = headers or {}


class ContextExceeded(RequestError):
    """A prompt of `prompt_tokens` and an answer of `wanted_tokens` exceed `context_tokens`. It is told in words that
    clients look for: they shorten the conversation then.

    `param` is what the prompt came in, None where that is not known; `bound` what asks for the answer's length, None
    where that may be as it is. `at_least`: the prompt was not counted to its end. Names are the route's own.
    """

    def __init__(
        self,
        context_tokens: int,
        prompt_tokens: int,
        *,
        param: str | None,
        wanted_tokens: int = 1,
        bound: str | None = None,
        at_least: bool = False,
    ) -> None:
        self.context_tokens = context_tokens
        self.prompt_tokens = prompt_tokens
        least = "at least " if at_least else ""
        if param is None:
            told = (
                f"you requested {prompt_tokens + wanted_tokens} ({prompt_tokens} of prompt, {wanted_tokens} of answer)"
            )
        elif bound is None:
            told = f"you sent {least}{prompt_tokens} in '{param}', and an answer needs one more: send fewer"
        else:
            most = context_tokens - prompt_tokens
            told = (
                f"you requested {prompt_tokens + wanted_tokens} ({prompt_tokens} in '{param}', and {wanted_tokens} by "
                f"'{bound}', which may be {most} at most)"
            )
        words = f"This model's maximum context length is {context_tokens} tokens. However, {told} ({CONTEXT_EXCEEDED})"
        super().__init__(words, code=CONTEXT_EXCEEDED, param=bound or param)

    @property
    def anthropic_words(self) -> str:
        """The same in the words of Anthropic's API. One token is the answer's at the least."""
        return f"prompt is too long: {self.prompt_tokens} tokens > {self.context_tokens - 1} maximum"


def build_gone_group_error(names: Sequence[str] = ()) -> RequestError:
    """Return what a request is answered that wants one group's bits (`system_fingerprint`) where no replica has them.
    `names`: the fingerprints that there are."""
    known = f"there is {' and '.join(names)}; ask for" if names else "leave it out, or ask for"
    text = f"no replica has the bits of this system_fingerprint any more: {known} one that serves"
    return RequestError(text, status=409, code="system_fingerprint_gone", param="system_fingerprint")


def build_replaced_error(*, begun: bool) -> RequestError:
    """Return what a request ends with whose model was replaced by another one; `begun`: it had tokens of the first."""
    if begun:
        text = "the model was replaced since this answer began, and another one cannot go on with it"
        return RequestError(f"{text}: send the request again as a new one", status=410, code="model_replaced")
    text = "the model was replaced while this request was read: send it again"
    return RequestError(text, status=503, code="model_replaced", retry_after_s=1)
