"""Converts a model to the IR that the adapter loads. Runs as a process of its own.

A directory that is an IR already is linked, once its graph was seen to become paged. GGUF files and Hugging Face
directories go through our own reader and builder: openvino_genai's reader rounds the offsets of Q4_1 and Q4_K. What is
to be quantised then is quantised by NNCF.

`python -m adapters.openvino_rt.convert SOURCE TARGET_DIR [WEIGHTS]`: a file that makes the native reader crash takes
this process down and nothing else. It goes on with what an earlier one left in TARGET_DIR. conversion_process.py says
what it prints.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from adapters.contract import Precision
from adapters.conversion_process import end_conversion, print_bytes
from adapters.decoder.source import fingerprint_of, open_source
from adapters.hf_directory import is_ir, read_ir_facts, title
from adapters.ir_facts import IR_FILE, IR_WEIGHTS
from adapters.openvino_rt.build import write_model
from adapters.openvino_rt.graph import read_paged
from adapters.parent_process import end_with_parent
from adapters.prepared_facts import Facts, facts_of, write_facts
from adapters.source_meter import SourceMeter
from device_profiles.profile import DRAFT, FAST, WeightsFormat

GROUP_SIZE = 32
"""Columns that share a scale where weights have 4 bits, as in GGUF. 8-bit weights have a scale a row."""
MODEL_FILE, WEIGHTS_FILE = "model.xml", "model.bin"


def compress(source: Path, target: Path, precision: Precision) -> None:
    """Read an IR, quantise the matrices that it holds in full to 4 or 8 bits, and write it to `target`.

    With 4 bits, embedding and output layer get 8: they are what small models lose most by. Raises RuntimeError or
    OSError.
    """
    import nncf
    import openvino as ov

    model = ov.Core().read_model(source)
    if precision is Precision.INT8:
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    else:
        model = nncf.compress_weights(
            model, mode=nncf.CompressWeightsMode.INT4_ASYM, group_size=GROUP_SIZE, ratio=1.0, all_layers=False
        )
    ov.save_model(model, target, compress_to_fp16=False)


def convert(source: Path, target: Path, meter: SourceMeter, weights: WeightsFormat | None = None) -> None:
    """Write model.xml, model.bin and spec.json, with weights in the format `weights` where one is given.

    Raises ModelRefused for a model that cannot be run, RuntimeError or ValueError from the libraries.
    """
    if weights is None and is_ir(source):
        link_ir(source, target)
        return
    opened = open_source(source, weights, meter.note)
    if weights in (Precision.INT4, Precision.INT8):
        whole = target / "whole"
        whole.mkdir(exist_ok=True)
        write_model(opened, whole / MODEL_FILE, meter)
        compress(whole / MODEL_FILE, target / MODEL_FILE, Precision(weights))
        shutil.rmtree(whole)
    else:
        write_model(opened, target / MODEL_FILE, meter)
    write_facts(target, facts_of(opened, source))


def link_ir(source: Path, target: Path) -> None:
    """Link a directory in OpenVINO's form, and write its spec.json. Raises ModelRefused for what cannot be made paged,
    and RuntimeError."""
    facts = read_ir_facts(source)
    for name, link in ((IR_FILE, MODEL_FILE), (IR_WEIGHTS, WEIGHTS_FILE)):
        (target / link).symlink_to((source / name).resolve())
    read_paged(target / MODEL_FILE)
    written: Facts = {
        "architecture": facts.family,
        "layers": facts.layers,
        "context_length": facts.context_length,
        "vocabulary_size": facts.vocabulary_size,
        "vocabulary_fingerprint": fingerprint_of(source, facts.vocabulary_size),
        "weights": facts.stored,
        "linked": title(source),
    }
    write_facts(target, written)


def main() -> int:
    """Run the conversion; returns the exit status."""
    end_with_parent()  # whoever waits for it may be told to end at any moment
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    word = sys.argv[3] if len(sys.argv) > 3 else None
    own: dict[str, WeightsFormat] = {FAST: FAST, DRAFT: DRAFT}
    weights = None if word is None else own[word] if word in own else Precision(word)
    return end_conversion(lambda: convert(source, target, SourceMeter(source, print_bytes), weights))


if __name__ == "__main__":
    sys.exit(main())
