"""`outrider batch`: a file of requests in OpenAI's batch format, answered by a running server."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from orchestrator.daemon.batches.lines import BatchInput
    from orchestrator.daemon.batches.run import BatchProgress

DEFAULT_URL = "http://127.0.0.1:8000/v1"
_TELL_EVERY_S = 5.0  # what a person waits for. Not tuned.


def batch(
    source: Annotated[
        Path, typer.Option("--input", help="JSON lines with `custom_id`, `method`, `url` and `body`, as OpenAI's.")
    ],
    output: Annotated[Path, typer.Option(help="Results, one line each. With results in it, the run goes on there.")],
    url: Annotated[str, typer.Option(help="Base of the API.")] = DEFAULT_URL,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Requests at a time.")] = 16,
    patience: Annotated[float, typer.Option(min=0.0, help="Seconds that the server may be away before we end.")] = 600,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds without an answer after which a request is asked for again.")
    ] = 3600,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary in JSON.")] = False,
) -> None:
    """Answer every line of --input into --output, each exactly once. The same command goes on where a run ended.

    Exits with 0 when every line has a result, error lines included; with 1 when some could not be finished."""
    import asyncio

    from orchestrator.daemon.batches.lines import BatchError, read_input
    from orchestrator.daemon.batches.results import open_results

    lines = read_input(source)
    if output.resolve() == source.resolve():
        raise BatchError(f"{output}: is the input; name another output")
    known = frozenset(place.result_id for place in lines.places)
    began_s = time.monotonic()
    with open_results(output, known) as results:
        for place in lines.places:
            if place.bad is not None and place.result_id not in results.done:
                message = place.bad.message.removeprefix(f"line {place.number}: ")
                typer.echo(f"outrider: {lines.path}:{place.number}: {message}", err=True)
        settings = {"url": url, "concurrency": concurrency, "patience_s": patience, "timeout_s": timeout}
        progress, stopped = asyncio.run(_run(lines, results, settings, api_key))
    summary = summarise(progress, time.monotonic() - began_s, stopped=stopped)
    if as_json:
        print(json.dumps(summary))
    else:
        typer.echo(_format_summary(summary, output), err=True)
    if summary["unfinished"]:
        if progress.unfinished and not as_json:
            typer.echo(f"outrider: {progress.last_problem}", err=True)
        raise typer.Exit(1)


async def _run(lines: BatchInput, results: Any, settings: dict[str, Any], api_key: str) -> tuple[BatchProgress, bool]:
    """Run until every line has a result, or until told to stop: then the second value is True."""
    import asyncio

    from orchestrator.daemon.batches.run import BatchRun, Outage
    from orchestrator.daemon.batches.server_client import open_client

    concurrency = settings["concurrency"]
    outage = Outage(settings["patience_s"])
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    server = open_client(settings["url"], api_key=api_key, concurrency=concurrency, timeout_s=settings["timeout_s"])
    with show_progress(len(lines.places)) as show:
        async with server as client:
            run = BatchRun(lines, results, client, concurrency=concurrency, outage=outage, on_change=show)
            show(run.progress)

            async def work() -> None:
                if run.progress.done < run.progress.total:
                    await client.wait_until_there(outage)
                    await run.run()

            working, stopping = asyncio.create_task(work()), asyncio.create_task(stop.wait())
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            stopped = not working.done()
            if stopped:
                working.cancel()
                await asyncio.wait([working])
            else:
                working.result()
    return run.progress, stopped


def summarise(progress: BatchProgress, seconds: float, *, stopped: bool) -> dict[str, Any]:
    """Return the figures of a run. `lines_per_s` = results of this run / seconds."""
    new = progress.done - progress.earlier
    return {
        "lines": progress.total,
        "done": progress.done,
        "errors": progress.failed,
        "unfinished": progress.total - progress.done,
        "from_earlier_runs": progress.earlier,
        "retries": progress.retries,
        "seconds": round(seconds, 3),
        "lines_per_s": round(new / seconds, 3) if seconds else 0.0,
        "stopped": stopped,
    }


def _format_summary(summary: dict[str, Any], output: Path) -> str:
    text = f"{output}: {summary['done']} of {summary['lines']} lines, {summary['errors']} with an error; "
    text += f"{summary['from_earlier_runs']} from earlier runs; {summary['seconds']:.1f} s, "
    text += f"{summary['lines_per_s']:.1f} lines/s, {summary['retries']} requests asked again"
    left = summary["unfinished"]
    return f"{text}; {left} not finished: the same command goes on" if left else text


@contextmanager
def show_progress(total: int) -> Iterator[Any]:
    """Yield what shows the progress: a bar on a terminal, a line now and then elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _LinePrinter()
        return
    columns = (TextColumn("lines"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]} errors"))
    with Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[problem]}"), console=console) as bar:
        task = bar.add_task("", total=total, failed=0, problem="")

        def show(progress: BatchProgress) -> None:
            problem = progress.last_problem[:60]
            bar.update(task, completed=progress.done, failed=progress.failed, problem=problem)

        yield show


class _LinePrinter:
    """Writes a line of progress every few seconds, and each problem that is new since the last line."""

    def __init__(self) -> None:
        self._told_s = time.monotonic()
        self._problem = ""

    def __call__(self, progress: BatchProgress) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s < _TELL_EVERY_S and progress.done < progress.total:
            return
        self._told_s = now_s
        text = f"{progress.done} of {progress.total} lines, {progress.failed} errors"
        if progress.last_problem != self._problem:
            self._problem = progress.last_problem
            text += f"; asked again: {progress.last_problem}"
        typer.echo(text, err=True)
