"""Converts a model to the IR that the adapter loads. Runs as a process of its own.

GGUF files and Hugging Face directories go through our own reader and builder: openvino_genai's reader rounds the
offsets of Q4_1 and Q4_K. What is to be quantised then is quantised by NNCF.

`python -m adapters.openvino_rt.convert SOURCE TARGET_DIR [WEIGHTS]`: a file that makes the native reader crash takes
this process down and nothing else. The last line on standard error says why it failed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from adapters.contract import ModelRefused, Precision
from adapters.decoder.source import open_source
from adapters.openvino_rt.build import write_model
from adapters.openvino_rt.compress import compress
from adapters.parent_process import end_with_parent
from adapters.prepared_facts import facts_of, write_facts
from device_profiles.profile import FAST, WeightsFormat

MODEL_FILE = "model.xml"


def convert(source: Path, target: Path, weights: WeightsFormat | None = None) -> None:
    """Write model.xml, model.bin and spec.json, with weights in the format `weights` where one is given.

    Raises ModelRefused for a model that cannot be run, RuntimeError or ValueError from the libraries.
    """
    opened = open_source(source, weights)
    if weights in (Precision.INT4, Precision.INT8):
        with tempfile.TemporaryDirectory(dir=target, prefix="whole-") as work:
            write_model(opened, Path(work) / MODEL_FILE)
            compress(Path(work) / MODEL_FILE, target / MODEL_FILE, Precision(weights))
    else:
        write_model(opened, target / MODEL_FILE)
    write_facts(target, facts_of(opened, source))


def main() -> int:
    """Run the conversion; 0 on success, 1 with the reason on standard error."""
    end_with_parent()  # whoever waits for it may be told to end at any moment
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    asked = sys.argv[3] if len(sys.argv) > 3 else None
    try:
        convert(source, target, FAST if asked == FAST else Precision(asked) if asked else None)
    except ModelRefused as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
