"""A small HTTP server that speaks the few routes of the Hugging Face hub that a download needs.

    GET  /api/models/ORG/NAME[/revision/REV]           the commit
    GET  /api/models/ORG/NAME/tree/REV?recursive=1     the files and their sizes
    HEAD, GET /ORG/NAME/resolve/COMMIT/FILE            a file, with Range

It can break a download in the middle, and answer as the hub does for gated and unknown models.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/(?P<what>revision|tree)/(?P<rev>[^/?]+))?")
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<file>.+)")


@dataclass
class Hub:
    """What the server holds: `models` by name and then by file name. A response longer than `stall_after` bytes stops
    there until `go_on` is set, one longer than `break_after` ends there, once. `requests` is the log of (method, path,
    range)."""

    models: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    break_after: int = 0
    stall_after: int = 0
    go_on: threading.Event = field(default_factory=threading.Event)
    stalled: threading.Event = field(default_factory=threading.Event)
    sizes: dict[str, int] = field(default_factory=dict)
    url: str = ""
    requests: list[tuple[str, str, str]] = field(default_factory=list)

    def commit(self, repo: str) -> str:
        """The one commit that a model has: it changes with its content."""
        digest = hashlib.sha1(usedforsecurity=False)
        for name, raw in sorted(self.models[repo].items()):
            digest.update(name.encode() + raw)
        return digest.hexdigest()

    def downloads(self, file: str) -> list[str]:
        """The ranges in which a file was asked for to its end, "" for all of it."""
        return [given for given in self.list_ranges(file) if not _TO_AN_END.search(given)]

    def heads(self, file: str) -> list[str]:
        """The ranges in which a part of a file was asked for."""
        return [given for given in self.list_ranges(file) if _TO_AN_END.search(given)]

    def list_ranges(self, file: str) -> list[str]:
        """The ranges in which a file was asked for."""
        return [given for method, path, given in self.requests if method == "GET" and path.endswith(file)]


_TO_AN_END = re.compile(r"-\d+$")


def _oid(raw: bytes) -> str:
    return hashlib.sha1(raw, usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        found = _API.fullmatch(path) or _FILE.fullmatch(path)
        parts = found.groupdict() if found else {}
        repo = parts.get("repo", "")
        if repo not in self.hub.models:
            self._send(
                401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."}, body
            )
        elif repo in self.hub.gated and "file" in parts:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, body)
        elif parts.get("rev", "main") not in ("main", None, self.hub.commit(repo)):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no revision"}, body)
        elif "file" in parts:
            self._file(repo, parts["file"] or "", body)
        else:
            self._send(200, json.dumps(self._facts(repo, parts.get("what"))).encode(), {}, body)

    def _facts(self, repo: str, what: str | None) -> Any:
        files = self.hub.models[repo]
        if what == "tree":
            return [
                {
                    "type": "file",
                    "path": name,
                    "size": self.hub.sizes.get(name, len(raw)),
                    "oid": _oid(raw),
                }
                for name, raw in files.items()
            ]
        return {"id": repo, "sha": self.hub.commit(repo), "siblings": [{"rfilename": name} for name in files]}

    def _file(self, repo: str, name: str, body: bool) -> None:
        raw = self.hub.models[repo].get(name)
        if raw is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "no file"}, body)
            return
        asked = self.headers.get("Range", "bytes=0-").removeprefix("bytes=")
        first, last = (int(part) if part else len(raw) - 1 for part in asked.split("-"))
        part = raw[first : last + 1]
        headers = {
            "ETag": f'"{_oid(raw)}"',
            "X-Repo-Commit": self.hub.commit(repo),
            "Accept-Ranges": "bytes",
        }
        whole = len(part) == len(raw)
        if not whole:
            headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(raw)}"
        cut = self.hub.break_after
        if body and cut and len(part) > cut:
            self.hub.break_after = 0
            self._send(200 if whole else 206, part, headers, body, cut)
        else:
            self._send(200 if whole else 206, part, headers, body)

    def _send(self, status: int, raw: bytes, headers: dict[str, str], body: bool, cut: int = 0) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        if not body:
            return
        stop = cut or self.hub.stall_after
        self.wfile.write(raw[:stop] if stop else raw)
        if cut:
            self.close_connection = True
        elif stop and len(raw) > stop:
            self.wfile.flush()
            self.hub.stalled.set()
            self.hub.go_on.wait()
            with suppress(OSError):  # whoever asked may be gone
                self.wfile.write(raw[stop:])


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve a hub on a free port of this machine."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()
