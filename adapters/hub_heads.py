"""Reads the heads of files of the Hugging Face hub by HTTP ranges: kilobytes or megabytes of what has gigabytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path, PurePosixPath

from adapters.contract import ModelRefused
from adapters.gguf_header import GgufHeader, parse_header
from adapters.safetensors_file import Stored
from device_profiles.units import MIB

_FIRST_BYTES = MIB
_REQUEST_TIMEOUT_S = 30.0
_AT_ONCE = 8
_PARTIAL = 206


def read_gguf_heads(repo: str, commit: str, sizes: Mapping[str, int]) -> list[GgufHeader]:
    """Return the heads of GGUF files, given with their sizes in bytes. Raises as `read_gguf_head`."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda file: read_gguf_head(repo, commit, file, sizes[file]), sizes))


@lru_cache(maxsize=32)  # of a split model all but the first are small
def read_gguf_head(repo: str, commit: str, file: str, file_bytes: int) -> GgufHeader:
    """Return the head of a GGUF file of so many bytes. Raises ModelRefused where it is damaged, and what the hub's
    library raises."""
    held = bytearray()

    def read(count: int) -> bytes:
        wanted = min(count, file_bytes)
        if len(held) < wanted:
            held.extend(_read_range(repo, commit, file, len(held), wanted))
        return bytes(held[:wanted])

    return parse_header(Path(PurePosixPath(file).name), read, file_bytes, _FIRST_BYTES)


def _read_range(repo: str, commit: str, file: str, start: int, end: int) -> bytes:
    """Return the bytes from `start` to before `end`, and read no more where the server would send all."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    # Compressed, the bytes of a range are not those of the file.
    headers = build_hf_headers() | {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    url = hf_hub_url(repo, file, revision=commit)
    content = bytearray()
    with get_session().stream("GET", url, headers=headers, timeout=_REQUEST_TIMEOUT_S) as response:
        hf_raise_for_status(response)
        skipped = 0 if response.status_code == _PARTIAL else start
        for chunk in response.iter_bytes():
            content.extend(chunk)
            if len(content) >= skipped + end - start:
                break
    return bytes(content[skipped : skipped + end - start])


def read_safetensors_heads(repo: str, commit: str, files: Sequence[str]) -> dict[str, Stored]:
    """Return the tensors by name that the heads of these files list. Raises ModelRefused where one is damaged, and what
    the hub's library raises."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        every = list(pool.map(lambda file: _read_safetensors_head(repo, commit, file), files))
    return {name: stored for tensors in every for name, stored in tensors.items()}


@lru_cache(maxsize=256)
def _read_safetensors_head(repo: str, commit: str, file: str) -> dict[str, Stored]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import SafetensorsParsingError

    try:
        head = HfApi().parse_safetensors_file_metadata(repo, file, revision=commit, timeout=_REQUEST_TIMEOUT_S)
    except SafetensorsParsingError as error:
        raise ModelRefused(f"{file}: it is no whole safetensors file ({error}). Choose another revision.") from error
    path = Path(file)
    return {
        name: Stored(name, path, str(facts.dtype), tuple(facts.shape), facts.data_offsets[0])
        for name, facts in head.tensors.items()
    }
