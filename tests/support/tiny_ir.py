"""Tiny random models as OpenVINO IR directories, in the stateful form that optimum-intel exports."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from adapters.decoder.source import open_source
from adapters.ir_facts import IR_FILE
from adapters.openvino_rt.build import write_model
from adapters.source_meter import SourceMeter
from tests.support import tiny_models

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def write_ir(directory: Path, name: str, **changes: Any) -> Path:
    """Write a model of tests/support/tiny_models.py as an IR directory with its tokenizer, and return it."""
    source = tiny_models.write_model(directory.with_name(f"{directory.name}-safetensors"), name, **changes)
    directory.mkdir()
    write_model(open_source(source), directory / IR_FILE, SourceMeter(source, lambda done, total: None))
    for file in ("config.json", *TOKENIZER_FILES):
        shutil.copy(source / file, directory)
    for note in directory.glob("*.kept"):
        note.unlink()
    return directory


def write_genai_ir(gguf: Path, directory: Path) -> Path:
    """Let openvino_genai write an IR directory of a GGUF file, and return it; without it the test is skipped."""
    genai = pytest.importorskip("openvino_genai")
    directory.mkdir()
    link = directory / "model.gguf"  # it writes beside the file that it is given
    link.symlink_to(gguf)
    genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    link.unlink()
    return directory
