"""Brings a model into the forms that other engines load, once: they are kept in `PeerOptions.work`."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adapters.contract import ModelRefused
from adapters.peers.contract import EngineMissing, PeerOptions, parse_directory
from adapters.peers.hf_export import write_hf_directory

_IR_FILE = "openvino_model.xml"
_TAIL = 300


def find_openvino_ir(genai: Any, options: PeerOptions, *, draft: bool = False) -> Path:
    """Return a directory with OpenVINO's IR and tokenizer: the user's, else what the engine makes of a GGUF file.

    Raises EngineMissing where there is neither."""
    given = None if draft else parse_directory(options)
    source = Path(options.draft if draft else options.source)
    if given is None and (source / _IR_FILE).is_file():
        given = source
    if given is not None:
        return given
    if source.is_dir():
        raise EngineMissing(
            f"{source.name} is no GGUF file: give OpenVINO's form of it with --model-of openvino_genai=DIR"
        )

    def write(target: Path) -> None:
        # The engine goes by the file's suffix, and files of a hub's cache or of a package may be links.
        (link := target / "model.gguf").symlink_to(source.resolve())
        genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)

    return _keep(options, f"openvino-{_digest(source)}", write)


def find_hf_directory(options: PeerOptions) -> Path:
    """Return a Hugging Face directory: the user's, the source itself, or the exact values of a GGUF file in float32.

    Raises EngineMissing for a file of which none can be made."""
    given = parse_directory(options)
    source = Path(options.source)
    if given is not None or source.is_dir():
        return given or source
    try:
        return _keep(
            options, f"hf-{_digest(source)}", lambda target: write_hf_directory(source, Path(options.tokenizer), target)
        )
    except ModelRefused as error:
        raise EngineMissing(str(error)) from error


def find_onnx_genai(options: PeerOptions) -> Path:
    """Return a model of onnxruntime_genai: the user's, else what its own builder makes for CPUs, with 4-bit weights.

    Raises EngineMissing where the builder fails; it needs torch and transformers."""
    given = parse_directory(options)
    if given is not None:
        return given
    source = find_hf_directory(options)

    def write(target: Path) -> None:
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(target)]
        cache = target.with_name(f"{target.name}-cache")
        done = subprocess.run(
            [*command, "-p", "int4", "-e", "cpu", "-c", str(cache)], capture_output=True, text=True, check=False
        )
        shutil.rmtree(cache, ignore_errors=True)
        if done.returncode:
            raise EngineMissing(
                f"its builder failed ({done.stderr.strip()[-_TAIL:]}); build a model by hand and give it with"
                " --model-of onnxruntime_genai=DIR"
            )

    return _keep(options, f"onnx-genai-int4-{_digest(source)}", write)


def _keep(options: PeerOptions, name: str, write: Callable[[Path], None]) -> Path:
    """Return the directory of that name, written whole or not at all."""
    target = Path(options.work) / name
    if target.is_dir():
        return target
    new = target.with_name(f".{name}.{os.getpid()}")
    new.mkdir(parents=True)
    try:
        write(new)
        new.rename(target)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    return target


def _digest(source: Path) -> str:
    """Return what tells a source from others: its place, its size and its time."""
    about = source.stat()
    return hashlib.blake2b(f"{source}|{about.st_size}|{about.st_mtime_ns}".encode(), digest_size=6).hexdigest()
