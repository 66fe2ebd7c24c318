"""Takes cluster.yaml as it is now: checks it whole, says what changes, and lets that take effect under streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from adapters.contract import AdapterError
from orchestrator.config.changes import Change, apply_changes, list_changes
from orchestrator.config.effective import list_values
from orchestrator.config.effects import Effect
from orchestrator.config.load import check_config, parse_config
from orchestrator.config.model import ClusterConfig
from orchestrator.config.source_text import Lines, Place, read_text
from orchestrator.daemon.bootstrap.target_change import TargetChange, affects_workers, explain_wait
from orchestrator.daemon.bootstrap.target_life import TargetLife
from orchestrator.errors import ConfigError, OutriderError
from orchestrator.redaction import redact_secrets
from orchestrator.telemetry import get_logger

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FileStanding:
    """Where a daemon's configuration stands. `overrides`: keys of `api` that the command line sets. `is_file`: False
    where the daemon serves a model without a file."""

    path: Path
    overrides: Mapping[str, Any] = field(default_factory=dict)
    is_file: bool = True

    def read(self) -> tuple[ClusterConfig, Lines]:
        """Return the file as it is now, checked whole, and the line of each value. Raises ConfigError."""
        if not self.is_file:
            raise ConfigError(
                "this daemon serves a model without a cluster.yaml: there is nothing to reload; "
                "write one, and start `outrider serve --config FILE`"
            )
        parsed, lines = parse_config(read_text(self.path), self.path)
        config = check_config(parsed, self.path, lines)
        if self.overrides:
            config = config.model_copy(update={"api": config.api.model_copy(update=dict(self.overrides))})
        return config, lines


class Reloader:
    """The configuration that runs. `adopt` lets what is not a target's take effect. One reload at a time: the next one
    waits."""

    def __init__(
        self,
        config: ClusterConfig,
        standing: FileStanding,
        targets: Sequence[TargetLife],
        adopt: Callable[[ClusterConfig], None],
    ) -> None:
        self.config = config
        self.waiting: list[Change] = []
        """What waits for a restart, by the last reload."""
        self.last = ""
        self.lock = asyncio.Lock()
        self._standing = standing
        self._targets = targets
        self._adopt = adopt

    def describe_file(self) -> dict[str, Any]:
        return {"last": self.last, "waiting": [describe_change(change) for change in self.waiting]}

    def list_values(self) -> dict[str, Any]:
        flags = [f"api.{name}" for name in self._standing.overrides] if self._standing.is_file else []
        return {"values": list_values(self.config), "flags": flags}

    async def reload(self, *, check: bool = False) -> dict[str, Any]:
        """Take the file as it is now; returns what has changed, as plain data. `check`: says it, and changes nothing.
        Raises ConfigError where the file cannot be used, and OutriderError where it does not take effect; nothing has
        changed then."""
        try:
            config, lines = await asyncio.to_thread(self._standing.read)
            changes, merged = self._weigh(config, lines)
            prepared = await self._prepare(merged, changes)
        except (OutriderError, AdapterError) as error:
            if not check:
                self.last = f"failed: {redact_secrets(str(error))}"
            raise ConfigError(str(error)) from error
        report = self._report(changes, prepared, check=check)
        if check:
            return report
        await self._take(prepared)
        for target, view in zip(self._targets, merged.targets, strict=True):
            target.take_rules(view)
        self._adopt(merged)
        self.config = merged
        self.waiting = [change for change in changes if change.effect is Effect.RESTART]
        done = len(changes) - len(self.waiting)
        replaced = [line for change in prepared if change is not None for line in change.replaced]
        taken = f", {len(replaced)} models were taken anew" if replaced else ""
        self.last = f"{done} changes took effect, {len(self.waiting)} wait for a restart{taken}"
        _log.info(
            "configuration reloaded",
            changed=[f"{change.name}: {change.before} -> {change.after} ({change.effect})" for change in changes],
            plan=[line for change in prepared if change is not None for line in change.notes],
        )
        return report

    def _weigh(self, config: ClusterConfig, lines: Lines) -> tuple[list[Change], ClusterConfig]:
        """Return what differs from what runs, with each effect, and the configuration that comes of it."""
        same = [model.name for model in config.models] == [model.name for model in self.config.models]
        wanted = config if same else config.model_copy(update={"models": self.config.models})  # these wait
        changes = list_changes(self.config, config, lambda place: self._judge(place, wanted.targets))
        merged = config
        if any(change.effect is Effect.RESTART for change in changes):
            try:
                merged = check_config(apply_changes(self.config, config, changes), self._standing.path, lines)
            except ConfigError:  # part of it makes sense only with what waits
                why = "it goes with another change that waits"
                changes = [
                    change if change.effect is Effect.RESTART else replace(change, effect=Effect.RESTART, why=why)
                    for change in changes
                ]
                merged = self.config
        return changes, merged

    def _judge(self, place: Place, wanted: Sequence[ClusterConfig]) -> str:
        numbers = [int(place[1]) + 1] if place[0] == "models" and len(place) > 1 else range(len(self._targets))
        reasons = [
            explain_wait(target.config, wanted[number], place, planned=target.is_planned)
            for number in numbers
            for target in [self._targets[number]]
        ]
        return next((reason for reason in reasons if reason), "")

    async def _prepare(self, merged: ClusterConfig, changes: Sequence[Change]) -> list[TargetChange | None]:
        prepared: list[TargetChange | None] = []
        for target, view in zip(self._targets, merged.targets, strict=True):
            concerned = not target.problem and (
                affects_workers(changes, view.number) or await target.is_model_replaced(view)
            )
            prepared.append(await target.prepare_change(view) if concerned else None)
        return prepared

    async def _take(self, prepared: Sequence[TargetChange | None]) -> None:
        """Let each target's change take effect. Raises ConfigError; those that had changed are as before then."""
        done: list[tuple[TargetLife, ClusterConfig]] = []
        for target, change in zip(self._targets, prepared, strict=True):
            if change is None:
                continue
            before = target.config
            try:
                await target.take_change(change)
            except (OutriderError, AdapterError) as error:
                for other, its in done:
                    await other.take_change(await other.prepare_change(its))
                self.last = f"failed: {redact_secrets(str(error))}"
                raise ConfigError(f"{self._standing.path}: nothing has changed: {error}") from error
            done.append((target, before))

    def _report(
        self, changes: Sequence[Change], prepared: Sequence[TargetChange | None], *, check: bool
    ) -> dict[str, Any]:
        return {
            "file": str(self._standing.path),
            "applied": not check,
            "changes": [describe_change(change) for change in changes],
            "workers": [
                {"model": target.name, "how": change.how, "told": list(change.notes)}
                for target, change in zip(self._targets, prepared, strict=True)
                if change is not None
            ],
            "replaced": [line for change in prepared if change is not None for line in change.replaced],
            "waiting": sum(change.effect is Effect.RESTART for change in changes),
        }


def describe_change(change: Change) -> dict[str, str]:
    return {
        "key": change.name,
        "before": change.before,
        "after": change.after,
        "effect": change.effect.value,
        "why": change.why,
    }
