"""What the tests of commands share."""

from __future__ import annotations

import sys

import pytest

from orchestrator.cli import main as cli


@pytest.fixture
def outrider(monkeypatch, capsys):
    """Run a command in this process: (exit code, standard output, standard error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["outrider", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
