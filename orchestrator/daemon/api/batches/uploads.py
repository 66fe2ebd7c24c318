"""Takes in `multipart/form-data` as it comes: a file goes to the disk piece by piece, and never into memory whole."""

from __future__ import annotations

from collections.abc import AsyncIterator

from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder, NeedData

from orchestrator.daemon.api.batches.store import Receiving
from orchestrator.errors import RequestError

MAX_FIELD_BYTES = 4096  # more than any field of OpenAI's forms has
MAX_PARTS = 16  # more than OpenAI's forms have
_BUFFER_BYTES = 1024 * 1024  # of a part's head, which waits in memory. Not tuned.


async def receive_form(
    content_type: str, stream: AsyncIterator[bytes], receiving: Receiving
) -> tuple[dict[str, str], str | None]:
    """Hand the part `file` to `receiving`; returns the other fields and the file's name (None). Raises RequestError."""
    kind, options = parse_options_header(content_type)
    boundary = options.get("boundary", "")
    if kind != "multipart/form-data" or not boundary:
        text = "send the file as multipart/form-data, with the fields 'file' and 'purpose'"
        raise RequestError(text, status=415, code="unsupported_media_type")
    form = _Form(receiving)
    decoder = MultipartDecoder(boundary.encode("latin-1", "replace"), _BUFFER_BYTES, max_parts=MAX_PARTS)
    try:
        async for data in stream:
            if data:
                decoder.receive_data(data)
                form.take_events(decoder)
        decoder.receive_data(None)
        form.take_events(decoder)
    except RequestEntityTooLarge:
        text = f"a form has up to {MAX_PARTS} parts, and fields of up to {MAX_FIELD_BYTES} bytes beside the file"
        raise RequestError(text, status=413, code="body_too_large") from None
    except ValueError as error:
        raise RequestError(f"the body is no multipart/form-data: {error}", code="invalid_form") from None
    return form.fields, form.filename


class _Form:
    def __init__(self, receiving: Receiving) -> None:
        self._receiving = receiving
        self._name: str | None = None  # of the field that comes in now; None: the file
        self.fields: dict[str, str] = {}
        self.filename: str | None = None

    def take_events(self, decoder: MultipartDecoder) -> None:
        """Take what has come in. Raises RequestError and ValueError."""
        while not isinstance(event := decoder.next_event(), (NeedData, Epilogue)):
            if isinstance(event, File):
                if event.name != "file" or self.filename is not None:
                    raise RequestError("one file is taken, in the field 'file'", code="invalid_form", param="file")
                self._name, self.filename = None, event.filename or "file"
            elif isinstance(event, Field):
                self._name = event.name
                self.fields[event.name] = ""
            elif isinstance(event, Data):
                if self._name is None:
                    self._receiving.take(event.data)
                else:
                    self.fields[self._name] += event.data.decode("utf-8", "replace")
                    if len(self.fields[self._name]) > MAX_FIELD_BYTES:
                        raise RequestEntityTooLarge
