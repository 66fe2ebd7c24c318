"""`/v1/files` and `/v1/batches`, in OpenAI's shape."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from fastapi import FastAPI, Query, Request
from starlette.responses import FileResponse, JSONResponse, Response

from orchestrator.daemon.api import errors
from orchestrator.daemon.api.batches import records
from orchestrator.daemon.api.batches.service import INPUT_PURPOSE, BatchService
from orchestrator.daemon.api.batches.uploads import receive_form
from orchestrator.daemon.api.body_bounds import unpack_stream
from orchestrator.daemon.api.keys import OWNER
from orchestrator.daemon.api.openapi import operation
from orchestrator.errors import RequestError

if TYPE_CHECKING:  # it imports us
    from orchestrator.daemon.api.app import ApiRoutes

MAX_METADATA = 16  # OpenAI's
_Record = TypeVar("_Record", records.FileRecord, records.BatchRecord)
_Limit = Annotated[int, Query(ge=1, le=10_000)]
_FORM = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
                "additionalProperties": False,
            }
        }
    },
}


def install_batch_routes(app: FastAPI, service: BatchService | None, reader: ApiRoutes) -> None:
    """Without a service the routes answer 404."""
    _install_file_routes(app, service)
    _install_batch_routes(app, service, reader)


def _install_file_routes(app: FastAPI, service: BatchService | None) -> None:
    uploading = operation(None, records.FileObject, statuses=(400, 401, 404, 408, 413, 415, 429, 500, 507))
    uploading["openapi_extra"] = {"requestBody": _FORM}

    @app.post("/v1/files", **uploading)
    async def upload_file(request: Request) -> Response:
        batches = _require(service)
        kind = request.headers.get("Content-Type", "")
        with batches.store.receive_file() as receiving:
            pieces = unpack_stream(request.stream(), request.headers.get("Content-Encoding", ""))
            fields, name = await receive_form(kind, pieces, receiving)
            _check_form(fields, name)
            record = await asyncio.to_thread(receiving.keep, _owner(request), name or "", INPUT_PURPOSE)
        return JSONResponse(record.show())

    @app.get("/v1/files", **operation(None, records.FileList, statuses=(400, 401, 404)))
    async def list_files(
        request: Request,
        purpose: str = "",
        after: str = "",
        limit: _Limit = 10_000,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        files = _require(service).store.files.values()
        mine = [file for file in files if file.owner == _owner(request) and purpose in ("", file.purpose)]
        return _page(mine, after, limit, newest_first=order == "desc")

    @app.get("/v1/files/{file_id}", **operation(None, records.FileObject, statuses=(401, 404)))
    async def find_file(request: Request, file_id: str) -> Response:
        return JSONResponse(_require(service).store.find_file(file_id, _owner(request)).show())

    @app.delete("/v1/files/{file_id}", **operation(None, records.FileDeleted, statuses=(401, 404, 409)))
    async def delete_file(request: Request, file_id: str) -> Response:
        _require(service).store.delete_file(file_id, _owner(request))
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    content = operation(None, None, statuses=(401, 404))
    content["responses"][200]["content"] = {"application/jsonl": {"schema": {"type": "string"}}}

    @app.get("/v1/files/{file_id}/content", **content)
    async def read_file(request: Request, file_id: str) -> Response:
        store = _require(service).store
        record = store.find_file(file_id, _owner(request))
        return FileResponse(store.path_of(record.id), media_type="application/jsonl")


def _install_batch_routes(app: FastAPI, service: BatchService | None, reader: ApiRoutes) -> None:
    @app.post(
        "/v1/batches",
        **operation(records.CreateBatch, records.BatchObject, statuses=(400, 401, 404, 413, 415, 429, 500, 507)),
    )
    async def create_batch(request: Request) -> Response:
        batches = _require(service)
        body: records.CreateBatch = await reader.do_with_body(
            request, lambda raw: errors.parse_body(records.CreateBatch, raw)
        )
        _check_metadata(body.metadata)
        return JSONResponse(batches.create(body, _owner(request)).show())

    @app.get("/v1/batches", **operation(None, records.BatchList, statuses=(400, 401, 404)))
    async def list_batches(request: Request, after: str = "", limit: _Limit = 20) -> Response:
        batches = _require(service).store.batches.values()
        return _page([batch for batch in batches if batch.owner == _owner(request)], after, limit, newest_first=True)

    @app.get("/v1/batches/{batch_id}", **operation(None, records.BatchObject, statuses=(401, 404)))
    async def find_batch(request: Request, batch_id: str) -> Response:
        return JSONResponse(_require(service).store.find_batch(batch_id, _owner(request)).show())

    @app.post("/v1/batches/{batch_id}/cancel", **operation(None, records.BatchObject, statuses=(401, 404, 409, 429)))
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        return JSONResponse(_require(service).cancel(batch_id, _owner(request)).show())


def _require(service: BatchService | None) -> BatchService:
    if service is None:
        text = "files and batches are off here (batches.enabled); `outrider batch` needs neither"
        raise RequestError(text, status=404, code="batches_off")
    return service


def _owner(request: Request) -> str:
    return str(request.scope.get(OWNER, ""))


def _check_form(fields: dict[str, str], name: str | None) -> None:
    if name is None:
        raise RequestError("'file' is missing", code="missing_parameter", param="file")
    if "purpose" not in fields:
        raise RequestError("'purpose' is missing", code="missing_parameter", param="purpose")
    if fields["purpose"] != "batch":
        raise RequestError("'purpose': files are for batches here; send 'batch'", code="invalid_value", param="purpose")
    if unknown := sorted(fields.keys() - {"purpose"}):
        text = f"'{unknown[0][:80]}' is not supported yet"
        raise RequestError(text, code="not_supported", param=unknown[0][:80])


def _check_metadata(metadata: dict[str, str] | None) -> None:
    if metadata is not None and (
        len(metadata) > MAX_METADATA or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items())
    ):
        text = f"'metadata' has up to {MAX_METADATA} keys of 64 characters, with values of 512"
        raise RequestError(text, code="invalid_value", param="metadata")


def _page(known: Sequence[_Record], after: str, limit: int, *, newest_first: bool) -> Response:
    """Return a page in OpenAI's shape: `limit` records behind the one that is named `after`. Raises RequestError."""
    ordered = list(reversed(known)) if newest_first else list(known)
    if after:
        places = [index for index, record in enumerate(ordered) if record.id == after]
        if not places:
            raise RequestError(f"'after': there is no '{after[:80]}' here", code="invalid_value", param="after")
        ordered = ordered[places[0] + 1 :]
    data = [record.show() for record in ordered[:limit]]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return JSONResponse({"object": "list", "data": data, **ends, "has_more": len(ordered) > limit})
