"""Converts a model to the IR that the adapter loads. Runs as a process of its own.

A GGUF file goes through openvino_genai's reader where that knows the architecture. All else goes through our own
builder: Hugging Face directories, other GGUF files, and GGUF files whose weights are wanted in another format. What is
to be quantised then is quantised by NNCF.

`python -m adapters.openvino_rt.convert SOURCE TARGET_DIR [WEIGHTS]`: a file that makes the native reader crash takes
this process down and nothing else. The last line on standard error says why it failed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from adapters.contract import ModelRefused, Precision
from adapters.decoder.source import fingerprint_of, open_source
from adapters.model_source import check_gguf
from adapters.openvino_rt.build import write_model
from adapters.openvino_rt.compress import compress
from adapters.openvino_rt.fuse import fuse_attention_inputs
from adapters.prepared_facts import Facts, facts_of, write_facts

MODEL_FILE = "model.xml"

_GENAI_READS = ("llama", "qwen2", "qwen3")
# general.file_type of llama.cpp's GGUF files (llama.h, enum llama_ftype); the reader keeps these weights.
_GGUF_WEIGHTS = {
    0: "fp32",
    1: "fp16",
    2: "int4 (Q4_0)",
    3: "int4 (Q4_1)",
    7: "int8 (Q8_0)",
    15: "int4 (Q4_K)",
}


def convert(source: Path, target: Path, precision: Precision | None = None) -> None:
    """Write model.xml, model.bin and spec.json, with weights in the format `precision` where one is given.

    Raises ModelRefused for a model that cannot be run, RuntimeError or ValueError from the libraries.
    """
    read_by_genai = precision is None and source.is_file() and check_gguf(source).architecture in _GENAI_READS
    facts = _from_gguf(source, target) if read_by_genai else _built(source, target, precision)
    write_facts(target, facts)


def _built(source: Path, target: Path, precision: Precision | None) -> Facts:
    weights = open_source(source, precision)
    if precision in (Precision.INT4, Precision.INT8):
        with tempfile.TemporaryDirectory(dir=target, prefix="whole-") as work:
            write_model(weights, Path(work) / MODEL_FILE)
            compress(Path(work) / MODEL_FILE, target / MODEL_FILE, precision)
    else:
        write_model(weights, target / MODEL_FILE)
    return facts_of(weights, source)


def _from_gguf(source: Path, target: Path) -> Facts:
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
    facts = check_gguf(source)
    kind = facts.file_type
    return {
        "architecture": facts.architecture,
        "layers": facts.layers,
        "context_length": facts.context_length,
        "vocabulary_size": facts.vocabulary_size,
        "vocabulary_fingerprint": fingerprint_of(source, facts.vocabulary_size),
        "weights": "unknown" if kind is None else _GGUF_WEIGHTS.get(kind, f"gguf type {kind}"),
    }


def main() -> int:
    """Run the conversion; 0 on success, 1 with the reason on standard error."""
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    precision = Precision(sys.argv[3]) if len(sys.argv) > 3 else None
    try:
        convert(source, target, precision)
    except ModelRefused as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
