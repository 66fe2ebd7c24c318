"""The page's own files: read once, served with an ETag and packed where the browser takes that."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

PAGE: Final = "index.html"
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    media_type: str
    whole: bytes
    packed: bytes
    etag: str

    def answer(self, request: Request) -> Response:
        headers = {**HEADERS, "ETag": self.etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if self.etag in request.headers.get("If-None-Match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            return Response(self.packed, media_type=self.media_type, headers={**headers, "Content-Encoding": "gzip"})
        return Response(self.whole, media_type=self.media_type, headers=headers)


def read_static_files(*, keys: bool) -> dict[str, StaticFile]:
    """Return the files by their paths. `keys`: the page asks for one before it asks the daemon for anything."""
    files: dict[str, StaticFile] = {}
    _read_folder(resources.files(__package__).joinpath("static"), "", files)
    if keys:
        files[PAGE] = _pack(_TYPES[".html"], files[PAGE].whole.replace(b'data-keys="no"', b'data-keys="yes"', 1))
    return files


def _pack(media_type: str, whole: bytes) -> StaticFile:
    etag = f'"{hashlib.sha256(whole).hexdigest()[:24]}"'
    return StaticFile(media_type, whole, gzip.compress(whole, mtime=0), etag)


def _read_folder(folder: Traversable, path: str, files: dict[str, StaticFile]) -> None:
    for entry in folder.iterdir():
        name = f"{path}{entry.name}"
        if entry.is_dir():
            _read_folder(entry, f"{name}/", files)
            continue
        media_type = next((kind for end, kind in _TYPES.items() if name.endswith(end)), None)
        if media_type is not None:
            files[name] = _pack(media_type, entry.read_bytes())
