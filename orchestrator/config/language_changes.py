"""What changed in the language of cluster.yaml and of sketches, by date: no release has a number of its own yet.

Whoever removes a key, moves one, or gives a value another meaning or default adds an entry here, in the same commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.config.source_text import Lines, Place, format_place

Data = Mapping[str, Any]
Kind = Literal["removed", "moved", "default", "meaning"]


@dataclass(frozen=True, slots=True)
class KeyEdit:
    """What becomes of a key: it goes to another place, or out of the file (None)."""

    place: Place
    to: Place | None = None


@dataclass(frozen=True, slots=True)
class LanguageChange:
    """One change. `find` returns the places of a file that it concerns: () stands for the file as a whole, where a key
    that is not there had another default. `edit` returns how these are rewritten; a change that leaves a choice has
    none. `text` says what changed, `todo` what whoever wants the old behaviour does."""

    name: str
    since: str
    kind: Kind
    text: str
    todo: str
    find: Callable[[Data], list[Place]] = field(repr=False)
    edit: Callable[[Data], list[KeyEdit]] = field(default=lambda data: [], repr=False)


def apply_edit(data: dict[str, Any], edit: KeyEdit) -> None:
    """Do to the values of a file what an edit does to its text. A mapping that would be empty goes too."""
    above: list[Any] = [data]
    for part in edit.place[:-1]:
        above.append(above[-1][part])
    value = above[-1].pop(edit.place[-1])
    for depth in range(len(above) - 1, 0, -1):
        part = edit.place[depth - 1]
        if above[depth] or not isinstance(part, str):
            break
        del above[depth - 1][part]
    if edit.to is not None:
        target: Any = data
        for part in edit.to[:-1]:
            target = target[part]
        target[edit.to[-1]] = value


def accept_old_keys(data: object, lines: Lines) -> list[str]:
    """Let the values of an old file be what they would be in a new one; returns a line for each key that was not."""
    told: list[str] = []
    if not isinstance(data, dict):
        return told
    for change in CHANGES:
        for edit in change.edit(data):
            line = lines.get(edit.place, 1)
            told.append(f"{line}: {format_place(edit.place)}: {change.text}; `outrider config migrate` rewrites it")
            if edit.to is not None:
                lines[edit.to] = line
            apply_edit(data, edit)
    return told


def look_up(data: Data, place: Place) -> Any:
    """Return the value at a place; None where there is none."""
    found: Any = data
    for part in place:
        if isinstance(part, str):
            found = found.get(part) if isinstance(found, Mapping) else None
        else:
            found = found[part] if isinstance(found, list) and part < len(found) else None
    return found


def _has(data: Data, place: Place) -> bool:
    above = look_up(data, place[:-1])
    return isinstance(above, Mapping) and place[-1] in above


def _where_set(*places: Place) -> Callable[[Data], list[Place]]:
    return lambda data: [place for place in places if _has(data, place)]


def _take_out(*places: Place) -> Callable[[Data], list[KeyEdit]]:
    return lambda data: [KeyEdit(place) for place in places if _has(data, place)]


def _where_unset(place: Place, applies: Callable[[Data], bool]) -> Callable[[Data], list[Place]]:
    return lambda data: [()] if not _has(data, place) and applies(data) else []


def _is_served(data: Data) -> bool:
    """A cluster.yaml, not a sketch."""
    return isinstance(data.get("model"), Mapping)


def _has_address(data: Data) -> bool:
    return bool(look_up(data, ("cluster", "address")))


def _has_journal(data: Data) -> bool:
    return look_up(data, ("journal", "enabled")) is not False


def _list_drafts(data: Data) -> list[Any]:
    drafts = data.get("drafts")
    return drafts if isinstance(drafts, list) else []


def _is_planned(data: Data) -> bool:
    models = [data.get("model"), *_list_drafts(data)]
    return any(isinstance(one, Mapping) and "auto" in (one.get("adapter"), one.get("device")) for one in models)


def _move_replicas(data: Data) -> list[KeyEdit]:
    to: Place = ("model", "replicas") if _is_served(data) else ("replicas",)
    place: Place = ("placement", "replicas")
    return [KeyEdit(place, None if _has(data, to) else to)] if _has(data, place) else []


def _list_gguf_sources(data: Data) -> list[Place]:
    """Return GGUF models whose number format is the file's or left open."""
    places: list[Place] = [("model",), *(("drafts", index) for index in range(len(_list_drafts(data))))]
    found: list[Place] = []
    for place in places:
        source, weights = look_up(data, (*place, "source")), look_up(data, (*place, "weights"))
        if ".gguf" in str(source or "") and weights in (None, "auto", "as_file"):
            found.append((*place, "weights" if weights else "source"))
    return found


def _list_contexts(data: Data) -> list[Place]:
    drafts: list[Place] = [("drafts", index, "shape", "context_length") for index in range(len(_list_drafts(data)))]
    places: list[Place] = [("target", "shape", "context_length"), *drafts]
    return [place for place in places if _has(data, place)]


_WEIGHTS = ("placement", "score_weights")

CHANGES: tuple[LanguageChange, ...] = (
    LanguageChange(
        *("batch-rows", "2026-11-21", "default"),
        "limits.max_batch_rows was 256 and is 1024: prompts are read in larger pieces",
        "limits.max_batch_rows: 256",
        _where_unset(("limits", "max_batch_rows"), _is_served),
    ),
    LanguageChange(
        *("prefill-chunk", "2026-11-21", "removed"),
        "limits.prefill_chunk is gone: prefill beside decoding is bounded by time, not by rows",
        "bound the wait for a next token with limits.max_itl_ms, which is 200",
        _where_set(("limits", "prefill_chunk")),
        _take_out(("limits", "prefill_chunk")),
    ),
    LanguageChange(
        *("placement-replicas", "2026-11-21", "moved"),
        "placement.replicas is model.replicas (in a sketch: replicas)",
        "nothing",
        _where_set(("placement", "replicas")),
        _move_replicas,
    ),
    LanguageChange(
        *("activations-auto", "2026-11-22", "meaning"),
        "model.activations auto takes the fastest numerical class that was measured to keep its bits: another one may "
        "run than before, and its bits differ",
        "name the format in model.activations",
        _where_unset(("model", "activations"), _is_served),
    ),
    LanguageChange(
        *("file-weights", "2026-11-22", "meaning"),
        "weights as_file keeps the values of Q4_1, Q4_K and Q5 files, in 8 bits; it rounded offsets before",
        "weights: fast rounds them as before",
        _list_gguf_sources,
    ),
    LanguageChange(
        *("score-weights", "2026-11-22", "removed"),
        "placement.score_weights.utilisation is gone: it changed no plan; idle_share weighs what is measured now",
        "placement.score_weights.idle_share",
        _where_set((*_WEIGHTS, "utilisation")),
        _take_out((*_WEIGHTS, "utilisation")),
    ),
    LanguageChange(
        *("sketched-context", "2026-11-22", "removed"),
        "context_length of a sketched model's shape is gone: nothing read it",
        "nothing",
        _list_contexts,
        lambda data: [KeyEdit(place) for place in _list_contexts(data)],
    ),
    LanguageChange(
        *("set-point", "2026-11-22", "meaning"),
        "speculation.pid.set_point is a share of the acceptance rate that drafts promise, not the rate itself; its "
        "default was 0.7 and is 0.5",
        "none: leave it out, or measure anew",
        _where_set(("speculation", "pid", "set_point")),
    ),
    LanguageChange(
        *("runtime", "2026-11-22", "default"),
        "cluster.runtime was ray and is auto: without cluster.address workers are subprocesses, and no Ray is started",
        "cluster.runtime: ray",
        _where_unset(("cluster", "runtime"), lambda data: _is_served(data) and not _has_address(data)),
    ),
    LanguageChange(
        *("ray-token", "2026-11-22", "default"),
        "cluster.auth is new: a Ray at cluster.address is joined with its token only (RAY_AUTH_TOKEN)",
        "cluster.auth: none, where that Ray has no token",
        _where_unset(("cluster", "auth"), _has_address),
    ),
    LanguageChange(
        *("orphans", "2026-11-22", "default"),
        "cluster.orphan_wait_s is new: workers of a daemon that was killed stay loaded for the next one, for 60 s",
        "cluster.orphan_wait_s: 0",
        _where_unset(("cluster", "orphan_wait_s"), _is_served),
    ),
    LanguageChange(
        *("journal", "2026-11-22", "default"),
        "journal is new and on: prompts and answers are kept as tokens in the state directory, for a minute",
        "journal: {enabled: false}",
        _where_unset(("journal", "enabled"), _is_served),
    ),
    LanguageChange(
        *("standby", "2026-11-23", "meaning"),
        "placement.standby, which is true, is carried out: while the target is lost it runs where the plan says",
        "placement.standby: false",
        _where_unset(("placement", "standby"), _is_planned),
    ),
    LanguageChange(
        *("scores-fed", "2026-11-23", "meaning"),
        "placement.score_weights.health and queue_depth are back and count: they changed no plan before",
        "placement.score_weights: {health: 0, queue_depth: 0}",
        _where_set((*_WEIGHTS, "health"), (*_WEIGHTS, "queue_depth")),
    ),
    LanguageChange(
        *("batches", "2026-11-23", "default"),
        "batches is new and on: /v1/files and /v1/batches take files, up to 1 GiB in the state directory",
        "batches: {enabled: false}",
        _where_unset(("batches", "enabled"), _is_served),
    ),
    LanguageChange(
        *("discover", "2026-11-23", "default"),
        "cluster.discover is new and true: with cluster.address and something auto, plans are made over all hosts of "
        "that Ray; before, only the daemon's own host was planned",
        "cluster.discover: false",
        _where_unset(("cluster", "discover"), lambda data: _has_address(data) and _is_planned(data)),
    ),
    LanguageChange(
        *("journal-reserve", "2026-11-28", "default"),
        "journal.reserve is new: 16 MiB of the state directory's disk are allocated ahead",
        "journal.reserve: 256 KiB, which is the least",
        _where_unset(("journal", "reserve"), lambda data: _is_served(data) and _has_journal(data)),
    ),
)
"""The oldest first."""
