"""Brings a model into the forms that other engines load, once: they are kept in `PeerOptions.work`.

A form is named by the content of what it is made of and by the version of its maker. Another path to the same file
finds it again, and a new version of an engine does not load what an old one wrote.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from adapters.content_digest import DigestCache
from adapters.contract import ModelRefused
from adapters.gguf_splits import list_beside
from outrider_lab.peers.contract import EngineMissing, PeerOptions, announce, parse_directory
from outrider_lab.peers.hf_export import write_hf_directory

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
        # The engine goes by the file's suffix, and finds the files of a split model by their names. Files of a hub's
        # cache or of a package may be links.
        files = list_beside(source)
        links = [target / (file.name if len(files) > 1 else "model.gguf") for file in files]
        for link, file in zip(links, files, strict=True):
            link.symlink_to(file.resolve())
        genai.LLMPipeline(str(links[0]), "CPU", enable_save_ov_model=True)

    return _keep(options, f"openvino-{version('openvino-genai')}-{_digest(options, source)}", write)


def find_hf_directory(options: PeerOptions) -> Path:
    """Return a Hugging Face directory: the user's, the source itself, or the exact values of a GGUF file in float32.

    Raises EngineMissing for a file of which none can be made."""
    given = parse_directory(options)
    source = Path(options.source)
    if given is not None or source.is_dir():
        return given or source
    try:
        return _keep(
            options,
            f"hf-{_digest(options, source)}",
            lambda target: write_hf_directory(source, Path(options.tokenizer), target),
        )
    except ModelRefused as error:
        raise EngineMissing(str(error)) from error


def find_onnx_genai(options: PeerOptions) -> Path:
    """Return a model of onnxruntime_genai: the user's, else what its own builder makes for CPUs, with 4-bit weights.

    Raises EngineMissing where the builder fails; it needs torch and transformers."""
    given = parse_directory(options)
    if given is not None:
        return given
    name = f"onnx-genai-int4-{version('onnxruntime-genai')}-{_digest(options, Path(options.source))}"

    def write(target: Path) -> None:
        source = find_hf_directory(options)
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

    return _keep(options, name, write)


def _keep(options: PeerOptions, name: str, write: Callable[[Path], None]) -> Path:
    """Return the directory of that name, written whole or not at all."""
    target = Path(options.work) / name
    if target.is_dir():
        return target
    announce(f"converting once into {target}")
    new = target.with_name(f".{name}.{os.getpid()}")
    new.mkdir(parents=True)
    try:
        write(new)
        new.rename(target)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    return target


def _digest(options: PeerOptions, source: Path) -> str:
    """Return a digest of a file's content, of all files of a split model, or of a directory's. Raises ModelRefused
    where they cannot be read."""
    files = sorted(one for one in source.iterdir() if one.is_file()) if source.is_dir() else list_beside(source)
    return DigestCache(Path(options.work) / "digests.json").digest_of(files, lambda *_: None)[:12]
