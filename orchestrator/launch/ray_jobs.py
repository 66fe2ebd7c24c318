"""Commands as jobs of a Ray cluster: submitted once, followed until their end, whoever submitted them.

Logs are asked for again and again, by their whole text: that outlives a lost connection, and Ray's own way to follow
them ends by itself at times.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.errors import OutriderError

INSTALL = "outrider extras install jobs"
# ADR 0054: logs are polled. Not tuned.
LOOK_EVERY_S = 1.0
AWAY_S = 120.0
"""How long a job server may be away while a job is followed. ADR 0054. Not tuned."""
_OK = "SUCCEEDED"


class JobError(OutriderError):
    """A job cannot be submitted or followed."""


class JobClient(Protocol):
    """What is used of ray.job_submission.JobSubmissionClient."""

    def submit_job(
        self, *, entrypoint: str, submission_id: str | None, runtime_env: dict[str, Any], metadata: dict[str, str]
    ) -> str: ...

    def get_job_info(self, job_id: str) -> Any: ...

    def get_job_logs(self, job_id: str) -> str: ...


@dataclass(frozen=True, slots=True)
class JobEnd:
    status: str
    message: str

    @property
    def succeeded(self) -> bool:
        """True where its command ended with 0."""
        return self.status == _OK


def connect(address: str) -> JobClient:
    """Return a client of the job server at `address` ("": as Ray's own commands find it). Raises JobError."""
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # without it Ray's client sends none
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise JobError(f"jobs need Ray's client: {error}; {INSTALL}") from error
    try:
        client: JobClient = JobSubmissionClient(address or None)
    except Exception as error:  # Ray raises whatever its parts raise
        where = address or "RAY_API_SERVER_ADDRESS, RAY_ADDRESS or this host"
        way_out = (
            "is a head with its dashboard running there (ray start --head, with ray[default] installed), "
            "and does RAY_AUTH_TOKEN match?"
        )
        raise JobError(f"no job server of Ray answers at {where}: {_first_line(error)}; {way_out}") from error
    return client


def format_entrypoint(program: str, arguments: Sequence[str], directory: str = "") -> str:
    """Return the command line of a job. `directory`: where it is to run, on the host that runs it."""
    command = shlex.join([program, *arguments])
    return f"cd {shlex.quote(directory)} && exec {command}" if directory else f"exec {command}"


def submit(client: JobClient, entrypoint: str, submission_id: str, environment: Mapping[str, str]) -> tuple[str, bool]:
    """Submit a job, or find the one that has this id already. Returns its id, and whether it was there. Raises JobError
    where that one runs another command."""
    if submission_id and (job := _find_job(client, submission_id)) is not None:
        return _attach(job, submission_id, entrypoint)
    try:
        job_id = client.submit_job(
            entrypoint=entrypoint,
            submission_id=submission_id or None,
            runtime_env={"env_vars": dict(environment)} if environment else {},
            metadata={"submitted_by": "outrider"},
        )
    except Exception as error:
        if submission_id and (job := _find_job(client, submission_id)) is not None:  # another was faster
            return _attach(job, submission_id, entrypoint)
        raise JobError(f"the job was not taken: {_first_line(error)}") from error
    return job_id, False


def follow(client: JobClient, job_id: str, write: Callable[[str], None]) -> JobEnd:
    """Write a job's log as it grows, until the job has ended. Raises JobError where its server is away for too long."""
    written, away_since_s = 0, None
    while True:
        try:
            info = client.get_job_info(job_id)  # before the logs: those of an end are whole
            logs = client.get_job_logs(job_id)
        except (OSError, RuntimeError) as error:
            now_s = time.monotonic()
            away_since_s = now_s if away_since_s is None else away_since_s
            if now_s - away_since_s > AWAY_S:
                text = f"job {job_id} cannot be followed any more: {_first_line(error)}; it may run on"
                raise JobError(text) from error
            time.sleep(LOOK_EVERY_S)
            continue
        away_since_s = None
        if len(logs) > written:
            write(logs[written:])
            written = len(logs)
        if info.status.is_terminal():
            return JobEnd(str(info.status.value), _first_line(info.message or ""))
        time.sleep(LOOK_EVERY_S)


def _find_job(client: JobClient, job_id: str) -> Any | None:
    try:
        return client.get_job_info(job_id)
    except RuntimeError as error:
        if "404" in str(error):
            return None
        raise JobError(f"the job server does not say whether {job_id} is there: {_first_line(error)}") from error
    except OSError as error:
        raise JobError(f"the job server does not answer: {_first_line(error)}") from error


def _attach(job: Any, job_id: str, entrypoint: str) -> tuple[str, bool]:
    if job.entrypoint != entrypoint:
        raise JobError(f"job {job_id} is there, and runs another command: {job.entrypoint}; choose another id")
    return job_id, True


def _first_line(error: object) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
