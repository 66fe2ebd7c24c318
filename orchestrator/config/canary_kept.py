"""What to change in cluster.yaml, and in which lines, for a canary to become what everybody gets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from orchestrator.config.drafts import AnyDraft
from orchestrator.config.model import ClusterConfig
from orchestrator.config.source_text import Lines, Place, format_place, parse_text, read_text
from orchestrator.config.speculation import CanarySpeculation


def differences(config: ClusterConfig) -> list[str]:
    """Return what is other in the canary, a line each: "speculation.method: auto -> off"."""
    changes = [f"speculation.{key}: {ours} -> {theirs}" for key, ours, theirs in _list_differing(config)]
    if config.canary_drafts:
        named = [", ".join(map(_format_draft, drafts)) or "none" for drafts in (config.drafts, config.canary_drafts)]
        changes.append(f"drafts: {named[0]} -> {named[1]}")
    return changes


def to_keep(config: ClusterConfig, path: Path) -> list[str]:
    """Return the changes, each with the file's line that it is about. Raises ConfigError."""
    lines = parse_text(read_text(path), path)[1]
    changes = [_change(("speculation", key), str(theirs), path, lines) for key, _, theirs in _list_differing(config)]
    if config.canary_drafts:
        new = f"what stands under canary.drafts (line {lines.get(('canary', 'drafts'), 1)})"
        changes.append(_change(("drafts",), new, path, lines))
    return [*changes, f"{path.name}:{lines.get(('canary',), 1)}: canary: take the section out"]


def _list_differing(config: ClusterConfig) -> Iterator[tuple[str, object, object]]:
    for key in CanarySpeculation.model_fields:
        ours, theirs = getattr(config.speculation, key), getattr(config.canary_speculation, key)
        if ours != theirs:
            yield key, ours, theirs


def _change(place: Place, new: str, path: Path, lines: Lines) -> str:
    if place in lines:
        return f"{path.name}:{lines[place]}: {format_place(place)}: {new}"
    above = lines.get(place[:-1]) if len(place) > 1 else None
    where = f"{path.name}:{above}: {format_place(place)}" if above else f"{path.name}: {format_place(place)}"
    return f"{where}: {new} (a new line)"


def _format_draft(draft: AnyDraft) -> str:
    """Return a draft in few words: its method, and what is set in it."""
    keys = sorted(draft.model_fields_set - {"method"}, key=list(type(draft).model_fields).index)
    return f"{draft.method} ({', '.join(f'{key} {getattr(draft, key)}' for key in keys)})" if keys else draft.method
