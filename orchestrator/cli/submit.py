"""`outrider submit`: commands as jobs of a Ray cluster."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.errors import OutriderError

app = typer.Typer(no_args_is_help=True, help="Run a command as a job of a Ray cluster.")
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

Address = Annotated[str, typer.Option(help="The job server, as in http://HEAD:8265; else as `ray job` finds it.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Print the job's id and end.")]
SubmissionId = Annotated[str, typer.Option(help="The job's id; a job that has it is followed, not started again.")]
Program = Annotated[str, typer.Option(help="`outrider` on the host that runs the job.")]
Pass = Annotated[
    list[str] | None,
    typer.Option("--env", help="A variable of this environment that the job is to have; again for more."),
]


@app.command(context_settings=_PASS_ON)
def batch(
    context: typer.Context,
    source: Annotated[Path, typer.Option("--input", help="As of `outrider batch`, on the host that runs the job.")],
    output: Annotated[Path, typer.Option(help="The same.")],
    address: Address = "",
    no_wait: NoWait = False,
    submission_id: SubmissionId = "",
    program: Program = "outrider",
    passed: Pass = None,
) -> None:
    """Run `outrider batch` as a job; further options are those of `outrider batch`. Exits as the job does: 0 or 1."""
    arguments = ["batch", "--input", str(source.absolute()), "--output", str(output.absolute()), *context.args]
    _run([program, *arguments], "", address, submission_id, passed, wait=not no_wait)


def _add_command(name: str, text: str) -> None:
    """Add a command that passes everything on, and runs in a directory of this path."""

    @app.command(name, context_settings=_PASS_ON, help=text)
    def run_as_job(
        context: typer.Context,
        address: Address = "",
        no_wait: NoWait = False,
        submission_id: SubmissionId = "",
        program: Program = "outrider",
        passed: Pass = None,
    ) -> None:
        _run([program, name, *context.args], str(Path.cwd()), address, submission_id, passed, wait=not no_wait)


_add_command(
    "profile",
    "Run `outrider profile` as a job, in a directory of this path; further options are those of `outrider profile`.",
)
_add_command("bench", "Run `outrider bench ...` as a job, in a directory of this path; what follows is that command's.")


def _run(
    command: list[str], directory: str, address: str, submission_id: str, passed: list[str] | None, *, wait: bool
) -> None:
    """Submit a command, or find its job, and follow that. Raises typer.Exit with the job's exit code, 0 or 1."""
    for name in passed or []:
        if name not in os.environ:
            raise OutriderError(f"--env {name}: there is no such variable here")
    environment = {name: os.environ[name] for name in passed or []}
    from orchestrator.launch.ray_jobs import connect, follow, format_entrypoint, submit

    client = connect(address)
    entrypoint = format_entrypoint(command[0], command[1:], directory)
    job_id, was_there = submit(client, entrypoint, submission_id, environment)
    typer.echo(f"job {job_id} {'is there already' if was_there else 'submitted'}: {entrypoint}", err=True)
    if not wait:
        print(job_id)
        return
    try:
        end = follow(client, job_id, partial(print, end="", flush=True))
    except KeyboardInterrupt:
        again = "the same command with --submission-id follows it again"
        typer.echo(f"\njob {job_id} runs on: {again}; `ray job stop {job_id}` ends it", err=True)
        raise
    typer.echo(f"job {job_id}: {end.status}: {end.message}", err=True)
    if not end.succeeded:
        raise typer.Exit(1)
