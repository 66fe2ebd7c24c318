"""`outrider completion`: lets a shell complete commands, options, and the names of what runs."""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="Which shell the script is for.")],
) -> None:
    """Print the script that completes `outrider` in a shell: eval "$(outrider completion bash)" in ~/.bashrc, and
    `outrider completion fish | source` in fish. Names of workers and devices are the running daemon's."""
    from typer._completion_shared import get_completion_script

    from orchestrator.cli.main import COMPLETION_VARIABLE

    print(get_completion_script(prog_name="outrider", complete_var=COMPLETION_VARIABLE, shell=shell))
