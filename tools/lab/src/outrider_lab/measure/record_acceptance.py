"""Writes the recording that `outrider simulate` ships: drafts from the text along the default model's own outputs.

    python -m outrider_lab.measure.record_acceptance [--prompts FILE] [--limit N] [--max-tokens N] [--out FILE]

Each prompt is decoded greedily, and the drafter is asked behind every token, as a server with one request at a time
would ask it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from rich.progress import Progress

from orchestrator.config.load import default_config_path, load_config
from orchestrator.fitting.worker_options import engine_options
from orchestrator.protocol.commands import Submit
from orchestrator.recommend.record import ModeRun, measure_decoding
from orchestrator.recommend.run import encode_prompts
from orchestrator.worker.loading.engine import build_loop
from orchestrator.worker.loading.models import load_target
from orchestrator.worker.measuring.prompts import read_texts, spread
from outrider_lab.bench.policy.recorder import record_drafts
from outrider_lab.simulation.recording import pack_requests

_SHIPPED = Path(__file__).parents[1] / "simulation/shipped/suffix.json.gz"


def main() -> None:
    """Decode, record, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=Path("tools/prompts.jsonl"))
    parser.add_argument("--limit", type=int, default=39)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=_SHIPPED)
    asked = parser.parse_args()
    path = default_config_path()
    options = engine_options(load_config(path), path.resolve().parent)
    options = msgspec.structs.replace(options, max_running=8, prefix_reuse=False)
    texts = read_texts(asked.prompts)
    with Progress() as bar:
        task = bar.add_task("loading")
        target = load_target(options, lambda stage, fraction: bar.update(task, description=stage))
        prompts = encode_prompts(spread(texts, min(asked.limit, len(texts))), target)
        submits = [
            Submit(one.key, one.tokens, asked.max_tokens, stop_tokens=one.stop_tokens, route=one.category)
            for one in prompts
        ]
        loop, run = build_loop(target, options, None), ModeRun("plain")
        bar.update(task, description="decoding", total=2 * len(submits))
        for submit in submits:
            measure_decoding(loop, [submit], run)
            bar.advance(task)
        outputs = {key: record.tokens for key, record in run.records.items()}
        found = record_drafts(submits, outputs, options, target, lambda: bar.advance(task))["good"]
    asked.out.write_bytes(pack_requests(found))
    places = [draft for one in found for draft in one.drafts]
    proposed = sum(bool(draft.tokens) for draft in places)
    print(f"{asked.out}: {len(found)} requests, {len(places)} places, {proposed / len(places):.0%} with a proposal")


if __name__ == "__main__":
    main()
