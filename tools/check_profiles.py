"""Compares what stored profiles predict with real decoding, in tokens per second.

Run `outrider profile` first, on a machine that does nothing else. Every request says a fixed number of tokens, so that
a configuration's tokens are known; twice as many requests as run at once keep it full.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from device_profiles.acceptance import PairAcceptance
from device_profiles.measured import MeasuredModel
from device_profiles.units import MS_PER_S
from orchestrator.bootstrap import Target, build_drafter, build_loop, engine_options, load_target, load_tokenizer
from orchestrator.bootstrap.options import EngineOptions, SuffixOptions
from orchestrator.bootstrap.profile_work import planned_work, profile_store
from orchestrator.cluster.port import Submit
from orchestrator.config.load import load_config
from orchestrator.measuring.texts import TEXTS

OUTPUT_TOKENS = 64
CHUNK_ROWS = 512


@dataclass(frozen=True)
class Configuration:
    """What is run."""

    depth: int
    concurrency: int
    prompt_tokens: int


def predicted(model: MeasuredModel, pair: PairAcceptance, config: Configuration, prompt_tokens: float) -> float:
    """Return tokens per second: C E / (round + the prefill of the requests that start in it)."""
    sequences, found = config.concurrency, pair.at(max(1, config.depth))
    tokens, rows = (found.tokens, found.rows) if config.depth else (1.0, 1.0)
    context = prompt_tokens + OUTPUT_TOKENS / 2
    changes = found.changes_of(sequences) if config.depth else 0.0
    round_ms = model.cost.ms(sequences * rows, sequences, context, changes=changes)
    round_ms += model.overhead.ms(sequences, sequences * rows)
    round_ms += sequences * pair.draft_ms if config.depth else 0.0
    chunks = -(-prompt_tokens // CHUNK_ROWS)
    prefill_ms = model.cost.prefill_ms(int(prompt_tokens), chunk_rows=CHUNK_ROWS) + chunks * model.overhead.round_ms
    # The first token comes with the prefill.
    rounds = (OUTPUT_TOKENS - 1) / tokens
    return sequences * OUTPUT_TOKENS * MS_PER_S / (rounds * round_ms + sequences * prefill_ms)


def measured(target: Target, options: EngineOptions, config: Configuration, submits: list[Submit]) -> float:
    """Return the tokens per second of real decoding."""
    options = msgspec.structs.replace(
        options,
        max_running=config.concurrency,
        max_depth=config.depth,
        prefix_reuse=False,
        # The texts come again and again: an earlier output would tell all of the next.
        drafters=[
            msgspec.structs.replace(one, memory_bytes=0) for one in options.drafters if isinstance(one, SuffixOptions)
        ],
    )
    drafter = build_drafter(options, target) if config.depth else None
    loop = build_loop(target, options, drafter)
    started, tokens = time.perf_counter(), 0
    for submit in submits:
        loop.submit(submit)
    while not loop.idle:
        tokens += sum(len(delta.tokens) for delta in loop.run_round().deltas)
    return tokens / (time.perf_counter() - started)


def requests(target: Target, config: Configuration) -> list[Submit]:
    """Return requests of the shipped texts; longer prompts have other text in front."""
    tokenizer = load_tokenizer(target.tokenizer_dir)
    filler = tokenizer.encode("The harbour lay still, and nobody on the quay spoke of the ship. " * 200, special=False)
    count = 2 * config.concurrency if config.concurrency > 1 else 3
    made = []
    for number, (_, text) in zip(range(count), itertools.cycle(TEXTS), strict=False):
        prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
        prompt = filler[: max(0, config.prompt_tokens - len(prompt))] + prompt
        made.append(Submit(f"{number}", prompt, OUTPUT_TOKENS))
    return made


def main() -> None:
    """Print a line for each configuration, and the errors over all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("cluster.yaml"))
    parser.add_argument("--runtime", action="append", required=True)
    parser.add_argument("--depth", type=int, nargs="+", default=[0, 4, 12])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 12])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[40, 700])
    args = parser.parse_args()
    config = load_config(args.config)
    store = profile_store(config)
    errors = []
    print("runtime       depth  at once  prompt  predicted  measured   error")
    for work in planned_work(config, args.config.resolve().parent, args.runtime):
        if work.job.role != "target":
            continue
        options = engine_options(config, args.config.resolve().parent)
        options = options.with_model(adapter=work.job.model.adapter, device=work.job.model.device)
        target = load_target(options, lambda stage, fraction: None)
        model = work.stored(store)
        if model is None:
            raise SystemExit(f"{work.title} has no profile: run outrider profile first")
        digest = model.model_digest
        pairs = [one for one in store.pairs() if one.target_digest == digest and one.rule == "policy"]
        measured(target, options, Configuration(4, 4, 40), requests(target, Configuration(4, 4, 40)))  # warm up
        for chosen in itertools.starmap(
            Configuration, itertools.product(args.depth, args.concurrency, args.prompt_tokens)
        ):
            submits = requests(target, chosen)
            mean = statistics.mean(len(submit.prompt) for submit in submits)
            pair = min(pairs, key=lambda one: abs(one.sequences - chosen.concurrency))
            expected, found = predicted(model, pair, chosen, mean), measured(target, options, chosen, submits)
            errors.append(abs(expected - found) / found)
            print(
                f"{model.adapter:<13} {chosen.depth:>5} {chosen.concurrency:>8} {mean:>7.0f} "
                f"{expected:>10.1f} {found:>9.1f} {expected / found - 1:>7.1%}",
                flush=True,
            )
        target.model.close()
    print(f"{len(errors)} configurations: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")


if __name__ == "__main__":
    main()
