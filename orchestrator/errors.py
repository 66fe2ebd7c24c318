"""What goes wrong, as types. Every message is one line for a person and names the way out.

OutriderError
+-- ConfigError          cluster.yaml is wrong; the message begins with file:line
+-- WorkerError
|   +-- WorkerLost       the worker process ended or stopped answering
|   +-- WorkerStartFailed  it never became ready
|   +-- ClusterAway      the cluster, or the host asked for, is not there now: no fault of the worker's
+-- DaemonError          the daemon cannot start
+-- RequestError         a request that cannot be served; has an HTTP status and OpenAI's error fields
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.redaction import redact_secrets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from policies.serving.failover.blame import LossKind


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


class RequestError(OutriderError):
    """A request that cannot be served, with the fields of OpenAI's error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.headers = headers or {}


def build_replaced_error(*, begun: bool) -> RequestError:
    """Return what a request ends with whose model was replaced by another one; `begun`: it had tokens of the first."""
    if begun:
        text = "the model was replaced since this answer began, and another one cannot go on with it"
        return RequestError(f"{text}: send the request again as a new one", status=410, code="model_replaced")
    text = "the model was replaced while this request was read: send it again"
    return RequestError(text, status=503, kind="server_error", code="model_replaced", retry_after_s=1)
