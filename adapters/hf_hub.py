"""Models of the Hugging Face hub, in the hub's own cache: `hf:ORG/NAME` a directory, `hf:ORG/NAME/FILE.gguf` a file.

The first file of a split GGUF model stands for all of them. The cache, the token, the endpoint and offline mode are
huggingface_hub's, with its environment variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). A connection that
breaks is taken up where it broke; after a sudden death, files that were whole are kept.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from adapters.contract import AdapterError, ModelRefused, Progress
from adapters.decoder.spec import DecoderSizes
from adapters.gguf_header import GgufHeader, parse_header, read_header
from adapters.gguf_splits import join_headers, list_files, list_first_files
from adapters.hf_directory import (
    IR_TOKENIZER_FILES,
    SMALL_FILES,
    TOKENIZER_JSON,
    check_small_files,
    holds_ir,
    weight_names,
)
from adapters.model_checks import check_directory_heads, check_files, check_header
from adapters.safetensors_file import Stored
from device_profiles.units import MIB, human_bytes

_FIRST_BYTES = MIB
# Of one range of a head, 12 MiB at most (ADR 0104). Not tuned.
_REQUEST_TIMEOUT_S = 30.0
_AT_ONCE = 8  # requests to the hub. Not tuned.
_PARTIAL = 206  # HTTP's status of a range
HUB_PREFIX = "hf:"
HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./-]+\.gguf))?(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


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


class DownloadFailed(AdapterError):
    """The hub cannot be reached, or the disk is full; files that are whole are kept."""


@dataclass(frozen=True, slots=True)
class HubId:
    """`repo` is ORG/NAME. `revision` is a branch, a tag or a commit; a commit once it is pinned. `file` is "" for a
    directory with safetensors."""

    repo: str
    revision: str = "main"
    file: str = ""

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return bool(_COMMIT.fullmatch(self.revision))

    def __str__(self) -> str:
        file = f"/{self.file}" if self.file else ""
        return f"{HUB_PREFIX}{self.repo}{file}@{self.revision}"


def parse_id(source: str) -> HubId:
    """Return what `hf:ORG/NAME[/FILE.gguf][@REVISION]` says. Raises ModelRefused when it is not written so."""
    match = HUB_ID.fullmatch(source.removeprefix(HUB_PREFIX))
    if not match or ".." in source or not match["repo"].replace("/", "").strip("."):
        raise ModelRefused(
            f"{source}: write hf:ORG/NAME or hf:ORG/NAME/FILE.gguf, and behind it @REVISION for a branch, tag or commit"
        )
    return HubId(match["repo"], match["revision"] or "main", match["file"] or "")


def pin_revision(hub_id: HubId) -> HubId:
    """Return the model with its revision as a commit: the one that the cache knows, else the hub's newest.

    Asking the cache first means that a model does not change between two starts unless somebody wants it to.
    Raises ModelRefused when there is no such model or revision, DownloadFailed when the hub cannot be asked.
    """
    if hub_id.pinned:
        return hub_id
    api = _library().HfApi()
    from huggingface_hub.errors import RevisionResolutionError

    with _explain_errors(hub_id):
        try:
            resolved = api.resolve_revision(hub_id.repo, revision=hub_id.revision, local_files_only=True)
        except RevisionResolutionError:
            resolved = api.resolve_revision(hub_id.repo, revision=hub_id.revision)
    return replace(hub_id, revision=resolved.resolved)


def fetch(hub_id: HubId, progress: Progress, adapter: str = "") -> tuple[Path, HubId]:
    """Return the directory of a model's files, or the GGUF file that is named, and the commit, downloading what is
    missing.

    Only the files that `adapters.hf_directory` reads are downloaded. The small ones and the heads of the others come
    first, so that a model that cannot be run costs no gigabytes. `adapter`: see `check`. Raises ModelRefused for such a
    model and as `pin_revision` does; DownloadFailed when the connection stays broken or the disk is full: the next try
    begins with the file at hand.
    """
    pinned = pin_revision(hub_id)
    directory, sizes = _bring_small_files(pinned, progress)
    names = _list_weights(pinned, directory, sizes)
    if any(not (directory / name).exists() for name in names):
        _check_heads(pinned, directory, sizes, names, adapter)
        _bring(pinned, names, sizes, progress)
    return (directory / pinned.file if pinned.file else directory), pinned


def check(hub_id: HubId, adapter: str = "") -> DecoderSizes:
    """Check all that a model's heads say, without its weights: they are read by ranges, where they are not here.

    `adapter` as in `adapters.model_source.check_source`. A model's small files are brought into the hub's cache. Raises
    as `fetch` does.
    """
    pinned = pin_revision(hub_id)
    directory, sizes = _bring_small_files(pinned, lambda _stage, _fraction: None)
    names = _list_weights(pinned, directory, sizes)
    if all((directory / name).exists() for name in names):
        return check_files(directory / pinned.file, adapter=adapter)
    return _check_heads(pinned, directory, sizes, names, adapter)


def measure_weights(hub_id: HubId) -> int:
    """Return the bytes of the files that hold a model's weights, wherever they are. Raises as `fetch` does."""
    pinned = pin_revision(hub_id)
    directory, sizes = _bring_small_files(pinned, lambda _stage, _fraction: None)
    return sum(_size_of(pinned, sizes, name) for name in _list_weights(pinned, directory, sizes))


def find_head(hub_id: HubId) -> tuple[Path, GgufHeader | None]:
    """Return where a model's files are to be in the hub's cache, with the small ones there, and the head of a GGUF
    file that is not there yet (None where it is, and for a directory). Raises as `fetch` does."""
    pinned = pin_revision(hub_id)
    directory, sizes = _bring_small_files(pinned, lambda _stage, _fraction: None)
    path = directory / pinned.file
    if not pinned.file:
        return path, None
    header = _read_named_head(pinned, directory, sizes)
    list_files(header)  # refuses another file of a split model than the first
    return path, None if path.exists() else header


def _bring_small_files(pinned: HubId, progress: Progress) -> tuple[Path, dict[str, int]]:
    """Return where the files of a commit are kept, and the sizes of all that there are, with the small files there."""
    directory = _directory(pinned)
    _bring(pinned, SMALL_FILES, _listing(pinned), progress)
    sizes = _listing(pinned) or {path.name: path.stat().st_size for path in directory.iterdir()}
    if not pinned.file and holds_ir(sizes) and TOKENIZER_JSON not in sizes:
        _bring(pinned, IR_TOKENIZER_FILES, sizes, progress)
    return directory, sizes


def _list_weights(pinned: HubId, directory: Path, sizes: dict[str, int]) -> Sequence[str]:
    """Return which files of the repository hold the weights: of a split GGUF model all. Raises as `fetch` does."""
    if not pinned.file:
        check_small_files(directory, sizes)
        return weight_names(directory, sizes)
    names = list_files(_read_named_head(pinned, directory, sizes))
    return [str(PurePosixPath(pinned.file).with_name(name)) for name in names]


def _read_named_head(pinned: HubId, directory: Path, sizes: dict[str, int]) -> GgufHeader:
    path = directory / pinned.file
    if path.exists():
        return read_header(path)
    with _explain_errors(pinned):
        return read_gguf_head(pinned.repo, pinned.revision, pinned.file, _size_of(pinned, sizes, pinned.file))


def _check_heads(
    pinned: HubId, directory: Path, sizes: dict[str, int], names: Sequence[str], adapter: str
) -> DecoderSizes:
    """Check a model whose weights are at the hub. Raises as `fetch` does."""
    bytes_of = {name: _size_of(pinned, sizes, name) for name in names}
    with _explain_errors(pinned):
        if pinned.file:
            return check_header(join_headers(read_gguf_heads(pinned.repo, pinned.revision, bytes_of)), adapter)
        if holds_ir(sizes):
            return check_files(directory, adapter=adapter)
        tensors = read_safetensors_heads(pinned.repo, pinned.revision, names)
        return check_directory_heads(directory, tensors, adapter)


def _size_of(pinned: HubId, sizes: dict[str, int], name: str) -> int:
    """Return the size of one of a model's files in bytes. Raises ModelRefused where it has no such file."""
    known = sizes.get(name)
    if known is not None:
        return known
    if name != pinned.file:
        what = "one of the files of a split model" if pinned.file else "which its index names"
        raise ModelRefused(f"{pinned}: {name} is missing, {what}. Download all files, or choose another model.")
    ggufs = list_first_files(sizes)
    raise ModelRefused(f"{pinned}: there is no such file. GGUF files of the model: {', '.join(ggufs) or 'none'}.")


def _library() -> Any:
    import huggingface_hub  # half a second, which who runs a GGUF file does not pay

    if "HF_HUB_VERBOSITY" not in os.environ:  # its warnings would stand between our lines; what fails is told here
        huggingface_hub.logging.set_verbosity_error()
    return huggingface_hub


def _directory(pinned: HubId) -> Path:
    """Return where the cache keeps the files of a commit (the layout is part of the library's documentation)."""
    from huggingface_hub import constants

    storage = f"models--{pinned.repo.replace('/', '--')}"
    return Path(constants.HF_HUB_CACHE) / storage / "snapshots" / pinned.revision


def _bring(pinned: HubId, names: Sequence[str], sizes: dict[str, int], progress: Progress) -> None:
    """Bring files into the cache. `sizes` of the repository's files, {} while unknown.

    The library is not asked when all are there: it may use the network even then.
    """
    directory = _directory(pinned)
    missing = {name: size for name, size in sizes.items() if name in names and not (directory / name).exists()}
    if sizes and not missing:
        return
    with _explain_errors(pinned):
        _demand_space(directory, sum(missing.values()), pinned)
        bar = _bar(_reporter(f"download {pinned.repo}", sum(missing.values()), progress))
        _library().snapshot_download(pinned.repo, revision=pinned.revision, allow_patterns=list(names), tqdm_class=bar)


def _reporter(stage: str, total: int, progress: Progress) -> Callable[[int], None]:
    """Return what is told the bytes that are there, and passes on whole percents, each once."""
    shown = -1

    def report(done: int) -> None:
        nonlocal shown
        percent = min(100, 100 * done // total) if total else 0
        if percent > shown:
            shown = percent
            progress(stage, percent / 100)

    return report


def find_cached(hub_id: HubId) -> Path | None:
    """Return where a model is, as `fetch` does, whose files are all in the cache; else None. The hub is not asked."""
    api = _library().HfApi()
    from huggingface_hub.errors import RevisionResolutionError

    try:
        revision = api.resolve_revision(hub_id.repo, revision=hub_id.revision, local_files_only=True).resolved
    except RevisionResolutionError:
        return None
    pinned = replace(hub_id, revision=revision)
    sizes, directory = _listing(pinned), _directory(pinned)
    path = directory / pinned.file
    if any(name in sizes and not (directory / name).exists() for name in (*SMALL_FILES, pinned.file)):
        return None
    if not sizes or not path.exists():
        return None
    names = _list_weights(pinned, directory, sizes)
    return path if all((directory / name).exists() for name in names) else None


def is_listed(repo: str, commit: str) -> bool:
    """Return whether the cache has the list of a commit's files, without which the hub is asked for it."""
    return bool(_listing(HubId(repo, commit)))


def _listing(pinned: HubId) -> dict[str, int]:
    """Return the sizes in bytes of the repository's files, {} where the cache has no list."""
    library = _library()
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = library.get_cached_repo_tree(pinned.repo, revision=pinned.revision)
    except CachedRepoTreeNotFoundError:
        return {}
    return {file.path: int(file.size) for file in tree}


def _demand_space(cache: Path, needed: int, pinned: HubId) -> None:
    place = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise DownloadFailed(
            f"{pinned}: {human_bytes(needed)} are to be downloaded and {human_bytes(free)} are free in {cache}. "
            "Free some space there, or set HF_HOME to a directory on a larger disk."
        )


def _bar(report: Callable[[int], None]) -> type:
    """Return a progress bar class, as the library wants one, that draws nothing and reports bytes."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]  # it is untyped
        monitor_interval = 0  # no thread that redraws

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **(options | {"file": io.StringIO(), "disable": False, "leave": False}))

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if self.unit == "B":  # another bar counts files
                report(int(self.n))

    return Bar


@contextmanager
def _explain_errors(hub_id: HubId) -> Iterator[None]:
    """Turn what the library raises into one line with the way out."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{hub_id.repo}"
    try:
        yield
    except AdapterError:
        raise
    except errors.GatedRepoError as error:
        raise ModelRefused(
            f"{hub_id}: the model is gated. Accept its terms at {page}, then run `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelRefused(
            f"{hub_id}: there is no such model at {constants.ENDPOINT}, or it is private. Check the name; for a "
            "private model run `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.HFValidationError as error:
        raise ModelRefused(f"{hub_id}: {str(error).splitlines()[0]}") from error
    except errors.RevisionNotFoundError as error:
        raise ModelRefused(f"{hub_id}: the model has no such revision. See {page}/commits/main") from error
    except Exception as error:  # the library passes on whatever its HTTP client and the disk raise
        raise DownloadFailed(f"{hub_id}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    from huggingface_hub import constants

    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk of {constants.HF_HUB_CACHE} became full; files that are whole are kept. Free some space there, "
            "or set HF_HOME to a directory on a larger disk."
        )
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set and the cache does not hold the whole model. Unset it once to download."
    cause = error.__cause__ or error
    text = (str(cause).strip().splitlines() or [""])[0]
    return (
        f"it cannot be downloaded from {constants.ENDPOINT} ({type(cause).__name__}: {text}). Check the network and "
        "try again (files that are whole are kept), or give the path of a directory."
    )
