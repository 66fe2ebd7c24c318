"""`model.output_format`: it reaches the tokenizer of its target, and an unknown form is refused by its line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from orchestrator.config.load import load_config
from orchestrator.daemon.bootstrap.tokenizers import TargetTokenizers
from orchestrator.daemon.sandbox.sandbox import Sandbox
from orchestrator.errors import ConfigError

TEXT = "model:\n  source: simulated:toy\n  adapter: simulated\n  output_format: {form}\n"


def test_the_form_is_that_of_the_target_s_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(TEXT.format(form="glm"))
    form = load_config(tmp_path / "cluster.yaml").model.output_format
    sandbox = Sandbox()
    try:
        for more, shown in (([form], "glm"), ([], None)):
            tokenizers = TargetTokenizers(tmp_path, tmp_path, sandbox, lambda progress: None, *more)
            assert asyncio.run(tokenizers.load("simulated:toy", None)).output_form == shown
    finally:
        sandbox.close()


def test_a_form_that_is_not_known_is_refused_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(TEXT.format(form="herms"))
    with pytest.raises(ConfigError, match=r"cluster\.yaml:4: model\.output_format: must be 'auto', 'hermes'"):
        load_config(tmp_path / "cluster.yaml")
