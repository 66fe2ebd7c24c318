"""`outrider profile`: measures what the configured models cost on this machine's devices, and keeps it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from device_profiles.measured import MeasuredModel
from device_profiles.store import ProfileStore
from orchestrator.errors import OutriderError


class ProfileError(OutriderError):
    """Nothing can be measured as asked."""


def profile(
    device: Annotated[
        list[str] | None, typer.Option(help="RUNTIME or RUNTIME:DEVICE, as in openvino_rt:CPU; else all there are.")
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again what is stored already.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    config: Annotated[Path | None, typer.Option(help="cluster.yaml; else the usual places.")] = None,
) -> None:
    """Measure what the configured models cost on each runtime and device, and keep it in the store."""
    from orchestrator.bootstrap.profiling import Work, pending, planned_work, profile_store
    from orchestrator.config.load import default_config_path, load_config

    path = config or default_config_path()
    loaded = load_config(path)
    store = profile_store(loaded)
    work = planned_work(loaded, path.resolve().parent, device or [])
    todo: list[Work] = work if refresh else pending(work, store)
    if todo:
        _measure(todo, store, loaded)
    found = _stored(work, store)
    if as_json:
        print(json.dumps([dataclasses.asdict(one) for one in found], indent=1))
    else:
        _print(found)


def _measure(todo: Any, store: ProfileStore, config: Any) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from orchestrator.bootstrap.clusters import measuring_cluster
    from orchestrator.measuring.run import Watch, run

    console = Console(stderr=True)
    failures: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        tasks = {one.spec.name: bar.add_task(one.title, total=1.0) for one in todo}
        titles = {one.spec.name: one.title for one in todo}

        def progressed(name: str, stage: str, fraction: float) -> None:
            bar.update(tasks[name], description=f"{titles[name]}: {stage}", completed=max(0.0, fraction))

        watch = Watch(
            progress=progressed,
            found=lambda name, value: store.save(value),
            failed=lambda name, reason: failures.append(f"{titles[name]}: {reason}"),
        )
        asyncio.run(run(measuring_cluster(config), [one.spec for one in todo], watch))
    if failures:
        raise ProfileError("\n".join(failures))


def _stored(work: Any, store: ProfileStore) -> list[MeasuredModel]:
    return [found for one in work if (found := one.stored(store)) is not None]


def _print(found: list[MeasuredModel]) -> None:
    from rich.table import Table

    from orchestrator.cli.plain_table import add_row, wide_console

    table = Table("runtime", "device", "role", "model", "1 row ms", "5 rows ms", "prefill tok/s", "error", "load s")
    for one in found:
        add_row(
            table,
            one.adapter,
            one.device,
            one.role,
            f"{one.model} {one.weights}",
            f"{one.cost.ms(1):.2f}",
            f"{one.cost.ms(5):.2f}",
            f"{512e3 / one.cost.prefill_ms(512):.0f}",
            f"{one.decode_error:.1%}",
            f"{one.load_s:.1f}",
        )
    wide_console().print(table)
