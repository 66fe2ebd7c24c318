"""Bodies and answers on their way: packed bodies, HEAD, and characters at which readers of lines split."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import httpx
import pytest
from backports import zstd

from orchestrator.daemon.batches.results import encode_line
from orchestrator.json_lines import escape_line_ends
from tests.api.support import ScriptedControl, app_over, serving

MIB = 1024 * 1024
COMPLETION = {"model": "toy", "prompt": "x", "max_tokens": 5}
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "x"}]}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", COMPLETION),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", {"model": "toy", "input": "x"}),
    ("/v1/messages", CHAT | {"max_tokens": 5}),
    ("/v1/messages/count_tokens", CHAT),
    ("/tokenize", {"prompt": "x"}),
]
LINE_ENDS = "a\u2028b\u2029c\x85d"


def in_two(data: bytes) -> bytes:
    """Two frames, one behind the other: both formats allow that."""
    return gzip.compress(data[:7]) + gzip.compress(data[7:])


PACKERS = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZIP": in_two,
    "zstd": zstd.compress,
    "ZSTD": lambda data: zstd.compress(data[:7]) + zstd.compress(data[7:]),
    "identity": lambda data: data,
}


async def post(path: str, content: bytes, encoding: str, **settings: Any) -> httpx.Response:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    async with serving(app_over(ScriptedControl(), **settings)) as url, httpx.AsyncClient(base_url=url) as client:
        return await client.post(path, content=content, headers=headers)


@pytest.mark.parametrize("encoding", PACKERS)
@pytest.mark.parametrize(("path", "body"), ROUTES, ids=[path for path, _ in ROUTES])
async def test_packed_bodies_are_taken(path: str, body: dict[str, Any], encoding: str):
    answer = await post(path, PACKERS[encoding](json.dumps(body).encode()), encoding)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, zstd", "compress", "x" * 200])
async def test_other_ways_of_packing_are_415_and_say_which_are_taken(encoding: str):
    answer = await post("/v1/completions", zlib.compress(json.dumps(COMPLETION).encode()), encoding)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert answer.headers["Accept-Encoding"] == "gzip, zstd"
    assert len(answer.json()["error"]["message"]) < 200


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress], ids=["gzip", "zstd"])
@pytest.mark.parametrize("times", [1, 2])
async def test_what_grows_beyond_the_bound_is_refused(pack: Any, times: int):
    packed = b"".join(pack(b" " * (64 * MIB)) for _ in range(times))
    name = "gzip" if pack is gzip.compress else "zstd"
    answer = await post("/v1/completions", packed, name, max_body=MIB)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


async def test_packed_bytes_that_become_nothing_are_bounded_too():
    answer = await post("/v1/completions", gzip.compress(b"") * 100_000, "gzip", max_body=MIB)
    assert answer.status_code == 413


async def test_a_window_larger_than_http_allows_is_refused():
    options: dict[int, int] = {
        zstd.CompressionParameter.window_log: 27,
        zstd.CompressionParameter.enable_long_distance_matching: 1,
    }
    packer = zstd.ZstdCompressor(options=options)
    packed = packer.compress(b"{" + b" " * 1000) + packer.flush()
    answer = await post("/v1/completions", packed, "zstd")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_encoding")


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
@pytest.mark.parametrize("spoil", [lambda data: data[:-6], lambda _: b'{"model": "toy"}', lambda data: data + b"rest"])
async def test_what_is_packed_otherwise_than_it_says_is_400(encoding: str, spoil: Any):
    answer = await post("/v1/completions", spoil(PACKERS[encoding](json.dumps(COMPLETION).encode())), encoding)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_encoding"), answer.text


@pytest.mark.parametrize(
    "path",
    [
        "/health",
        "/health/decode",
        "/live",
        "/ready",
        "/started",
        "/metrics",
        "/version",
        "/v1/models",
        "/v1/models/toy",
    ],
)
async def test_head_is_get_without_a_body(path: str):
    async with serving(app_over(ScriptedControl())) as url, httpx.AsyncClient(base_url=url) as client:
        head, whole = await client.head(path), await client.get(path)
    assert head.status_code == whole.status_code == 200
    assert head.content == b""
    assert head.headers["Content-Type"] == whole.headers["Content-Type"]
    if path != "/metrics":
        assert head.headers["Content-Length"] == str(len(whole.content))


async def test_head_of_what_is_missing_says_so():
    async with serving(app_over(ScriptedControl())) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.head("/v1/models/nobody")).status_code == 404
        assert (await client.head("/v1/completions")).status_code == 405


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_the_list_of_models_may_have_a_slash_behind_it(method: str):
    async with serving(app_over(ScriptedControl())) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.request(method, "/v1/models/")
        assert answer.status_code == 200
        assert method == "HEAD" or answer.json() == (await client.get("/v1/models")).json()


@pytest.mark.parametrize(("path", "body"), ROUTES[:4], ids=[path for path, _ in ROUTES[:4]])
async def test_events_have_no_character_at_which_readers_of_lines_split(path: str, body: dict[str, Any]):
    tokens = [list(LINE_ENDS.encode())]
    async with serving(app_over(ScriptedControl(steps=tokens))) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post(path, json=body | {"stream": True, "metadata": {"user_id": LINE_ENDS}})
        assert answer.status_code == 200
        split = answer.text.splitlines()
    assert split == answer.text.removesuffix("\n").split("\n")
    events = [json.loads(line[6:]) for line in split if line.startswith("data: {")]
    assert LINE_ENDS in "".join(json.dumps(event, ensure_ascii=False) for event in events)


async def test_an_error_in_a_stream_has_none_either():
    control = ScriptedControl(steps=[[97], [98]], error=ValueError(LINE_ENDS), error_at=1)
    async with serving(app_over(control)) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post("/v1/completions", json=COMPLETION | {"stream": True})
    assert answer.text.splitlines() == answer.text.removesuffix("\n").split("\n")


@pytest.mark.parametrize("text", [LINE_ENDS, f"{LINE_ENDS}\ud800", "\u2028", "\u2026\u2019\u00e9", "\\u2028"])
def test_a_batchs_line_is_one_line_for_everybody(text: str):
    line = encode_line({"text": text}).decode()
    assert len(line.splitlines()) == 1
    assert json.loads(line) == {"text": text}


def test_escaping_leaves_values_as_they_are():
    text = "".join(map(chr, [*range(0x20, 0x300), *range(0x2000, 0x2100), 0x1F600]))
    found = escape_line_ends(json.dumps([text], ensure_ascii=False).encode())
    assert json.loads(found) == [text]
