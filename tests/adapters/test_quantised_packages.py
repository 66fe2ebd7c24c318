"""Quantised checkpoints whose packages are not among ours: run in an environment that has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.environments import make_environment, run_there

pytestmark = pytest.mark.slow
_BITSANDBYTES = "bitsandbytes==0.50.2"


def test_what_bitsandbytes_quantised_says_what_its_weights_say_to_transformers(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "venv", [_BITSANDBYTES])
    file = Path(__file__).with_name("test_any_decoder.py")
    printed = run_there(
        python, "-m", "pytest", "-p", "no:cacheprovider", file, "-k", "says_what and bitsandbytes", "--no-header"
    )
    assert "2 passed" in printed, printed
    assert "skipped" not in printed, printed
