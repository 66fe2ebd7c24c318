"""What is kept of files and batches, and what their owners are shown: OpenAI's objects."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from orchestrator.daemon.api.conversation import Body

LIVE = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
_SHOWN = (
    *("id", "endpoint", "input_file_id", "completion_window", "status", "output_file_id", "error_file_id"),
    *("created_at", "expires_at", "metadata"),
)


class FileRecord(msgspec.Struct, frozen=True):
    """A whole file. `owner`: the key's digest, "" without keys."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int

    def show(self) -> dict[str, Any]:
        fields = msgspec.structs.asdict(self)
        del fields["owner"]
        return {**fields, "object": "file", "status": "processed", "status_details": None}


class LineError(msgspec.Struct, frozen=True):
    """Why a batch failed."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(msgspec.Struct):
    """A batch; written whenever its status changes. `output_id` and `error_id` are the names that its outputs will
    have. `times`: when it came to each status, in seconds since 1970."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_id: str
    error_id: str
    metadata: dict[str, str] | None = None
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    times: dict[str, int] = {}
    errors: list[LineError] = []

    @property
    def live(self) -> bool:
        return self.status in LIVE

    def show(self) -> dict[str, Any]:
        errors = list(map(msgspec.structs.asdict, self.errors))
        steps = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "object": "batch",
            **{name: getattr(self, name) for name in _SHOWN},
            "errors": {"object": "list", "data": errors} if errors else None,
            **{f"{step}_at": self.times.get(step) for step in steps},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
        }


class CreateBatch(Body):
    """`POST /v1/batches`."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None


class FileObject(Body):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileList(Body):
    """Files, the newest first."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Body):
    """A file that is gone."""

    id: str
    object: Literal["file"]
    deleted: bool


class RequestCounts(Body):
    """Lines of a batch: all, those with an answer, and those with an error."""

    total: int
    completed: int
    failed: int


class BatchErrorEntry(Body):
    """Why a batch failed."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(Body):
    """Why a batch failed."""

    object: Literal["list"]
    data: list[BatchErrorEntry]


class BatchObject(Body):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(Body):
    """Batches, the newest first."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
