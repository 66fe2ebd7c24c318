"""Converts a GGUF file to the IR that the adapter loads. Runs as a process of its own.

`python -m adapters.openvino_rt.convert SOURCE TARGET_DIR`: a file that makes the native reader crash takes
this process down and nothing else. The last line on standard error says why it failed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from adapters.gguf_header import read_header
from adapters.model_source import check_gguf
from adapters.openvino_rt.fuse import fuse_attention_inputs
from device_profiles.workload import vocabulary_fingerprint

MODEL_FILE = "model.xml"
SPEC_FILE = "spec.json"


def convert(source: Path, target: Path) -> None:
    """Write model.xml, model.bin and spec.json. Raises RuntimeError or ValueError from the libraries."""
    import openvino as ov
    import openvino_genai

    with tempfile.TemporaryDirectory(dir=target, prefix="stateful-") as work:
        # The reader writes its IR beside the file that it is given, so it gets a link in our own directory.
        link = Path(work) / "model.gguf"
        link.symlink_to(source.resolve())
        openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
        model = ov.Core().read_model(Path(work) / "openvino_model.xml")
        fuse_attention_inputs(model)
        ov.save_model(model, target / MODEL_FILE, compress_to_fp16=False)
    (target / SPEC_FILE).write_text(json.dumps(_facts(source), indent=1), encoding="utf-8")


def _facts(source: Path) -> dict[str, str | int]:
    facts = check_gguf(source)
    return {
        "architecture": facts.architecture,
        "layers": facts.layers,
        "context_length": facts.context_length,
        "vocabulary_size": facts.vocabulary_size,
        "vocabulary_fingerprint": vocabulary_fingerprint(read_header(source).texts("tokenizer.ggml.tokens") or ()),
        "file_type": -1 if facts.file_type is None else facts.file_type,
    }


def main() -> int:
    """Run the conversion; 0 on success, 1 with the reason on standard error."""
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        convert(source, target)
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
