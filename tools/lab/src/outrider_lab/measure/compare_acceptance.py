"""How many drafts does each acceptance rule accept, on real text, from the same two models?

    python tools/compare_acceptance.py --prompts FILE [--limit N] [--max-tokens N] [--draft same|levels=8|skip=4]
                                       [--draft-adapter onnx_rt] [--temperature T] [--top-p P] [--depth K] [--json OUT]

The target is what cluster.yaml names. The draft is the same file on another runtime, or a worse copy of it. `levels=L`
rounds its 4-bit weights to L levels, and `skip=N` leaves out every Nth layer (both for Q4_1 files). Two figures each:

exact    over the rows of both models at every position of the target's own answers, no drafting: the chance that a
         draft of the next token is accepted. Rejection: sum over x of min(p, q) with q cut to its likeliest tokens
         (Leviathan et al., arXiv 2211.17192, corollary 3.6). Coupled: sum over x of 1 / (sum over y of max(p(y) / p(x),
         q(y) / q(x))), the chance that two Gumbel-max samples with one noise are the same token.
decoded  through the decode loop with the draft model at a fixed depth, the same prompts and seeds for every rule;
         tolerance behind a warm-up of WARMUP_TOKENS judged drafts of the same prompts with other seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from adapters.contract import LoadedModel, Segment
from adapters.gguf_header import GgufTensor, read_header
from adapters.model_source import resolve
from orchestrator.clock import SystemClock
from orchestrator.config.load import load_config
from orchestrator.drafting.model import ModelDrafter
from orchestrator.loading.engine import build_loop
from orchestrator.loading.models import LoadedTarget, load_model, load_target, silent
from orchestrator.loading.options import EngineOptions, engine_options
from orchestrator.recommend.decode import read_prompts
from orchestrator.recommend.record import Prompt
from orchestrator.workers.draft_messages import DrafterState
from orchestrator.workers.messages import Sampling, Submit
from policies.sampling import Acceptance, distribution

RULES: tuple[Acceptance, ...] = ("coupled", "rejection", "tolerance")
WIDTHS = (8, 16, 32, 64, 128, 256, 1 << 30)
WARMUP_TOKENS = 256
_Q4_1, _BLOCK_BYTES = 3, 20
Row = NDArray[np.float32]
Share = NDArray[np.float64]


def compute_coupled_acceptance(p: Share, q: Share) -> float:
    """Return the chance that argmax(log p + g) and argmax(log q + g) are the same token, g being one Gumbel noise.

    p, q: shape (vocabulary,). With tokens in order of r = q / p, the inner sum over y is p(r <= r_x) / p(x) +
    q(r > r_x) / q(x).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(p > 0.0, q / p, np.inf)
    order = np.argsort(ratio, kind="stable")
    p, q = p[order], q[order]
    below, above = np.cumsum(p), q.sum() - np.cumsum(q)
    both = (p > 0.0) & (q > 0.0)
    return float((1.0 / (below[both] / p[both] + np.maximum(above[both], 0.0) / q[both])).sum())


def rejection_acceptance(p: Share, q: Share, width: int) -> float:
    """Return the chance that a draft from q, cut to its `width` likeliest tokens, is accepted: sum of min(p, q)."""
    if np.count_nonzero(q) > width:
        kept = np.argpartition(-q, width - 1)[:width]
        cut = np.zeros_like(q)
        cut[kept] = q[kept] / q[kept].sum()
        q = cut
    return float(np.minimum(p, q).sum())


def dense(row: Row, sampling: Sampling) -> Share:
    """Return the filtered distribution over the whole vocabulary."""
    ids, shares = distribution(row, sampling)
    found = np.zeros(len(row))
    found[ids] = shares
    return found


def exact(
    target: LoadedModel, draft: LoadedModel, answers: Sequence[tuple[list[int], list[int]]], sampling: Sampling
) -> dict[str, float]:
    """Return the mean chance of acceptance of each rule over all positions of the answers."""
    coupled: list[float] = []
    rejected: dict[int, list[float]] = {width: [] for width in WIDTHS}
    width = min(target.spec.vocabulary_size, draft.spec.vocabulary_size)
    for prompt, answer in answers:
        pairs = zip(feed_tokens(target, prompt, answer), feed_tokens(draft, prompt, answer), strict=True)
        for ours, theirs in pairs:
            p, q = dense(ours[:width], sampling), dense(theirs[:width], sampling)
            coupled.append(compute_coupled_acceptance(p, q))
            for size, found in rejected.items():
                found.append(rejection_acceptance(p, q, size))
    figures = {"positions": float(len(coupled)), "coupled": float(np.mean(coupled))}
    return figures | {
        f"rejection, {'all' if size == WIDTHS[-1] else size} tokens": float(np.mean(found))
        for size, found in rejected.items()
    }


def feed_tokens(model: LoadedModel, prompt: list[int], answer: list[int]) -> Row:
    """Return the rows that choose the answer's tokens."""
    text, chunk, rows = [*prompt, *answer][:-1], min(256, model.capabilities.max_batch_rows), []
    for start in range(0, len(text), chunk):
        tokens = text[start : start + chunk]
        first = max(len(prompt) - 1 - start, 0)
        wanted = (first, len(tokens)) if first < len(tokens) else (0, 0)
        found = model.forward([Segment(0, start, tokens, wanted)]).logits
        rows.append(found[: wanted[1] - wanted[0]].copy())
    model.release(0)
    return np.concatenate(rows)


def decode_requests(
    target: LoadedTarget,
    drafter: ModelDrafter | None,
    options: EngineOptions,
    submits: list[Submit],
    warm_up: Sequence[Submit] = (),
) -> dict[str, Any]:
    """Decode and return the outputs, acceptance rate, and mean acceptance length (1 + accepted / verifications)."""
    loop = build_loop(target, options, drafter)
    for submit in warm_up:
        loop.submit(submit)
        while not loop.idle:
            loop.run_round_strictly()
    out: dict[str, list[int]] = {submit.request_id: [] for submit in submits}
    drafts = drafted = accepted = first = 0
    for submit in submits:  # one at a time: the draft's cache and the target's are never short of room
        loop.submit(submit)
        while not loop.idle:
            done = loop.run_round_strictly()
            for delta in done.deltas:
                out[delta.request_id].extend(delta.tokens)
            drafts, drafted, accepted = drafts + done.drafts, drafted + done.drafted, accepted + done.accepted
            first += sum(done.accepted_per_position[:1])
    return {
        "outputs": out,
        "first_draft": first / max(1, drafts),
        "acceptance_rate": accepted / max(1, drafted),
        "mean_acceptance_length": 1.0 + accepted / max(1, drafts),
        "deltas": loop.gauges(0).tolerance_deltas,
    }


def worse(path: Path, what: str, directory: Path) -> Path:
    """Write the copy of a GGUF file that `what` names; its Q4_1 tensors are changed, the others are not."""
    kind, _, number = what.partition("=")
    header, data = read_header(path), bytearray(path.read_bytes())
    for tensor in header.tensors:
        if tensor.kind != _Q4_1 or not _is_worsened(tensor, kind, int(number)):
            continue
        blocks = np.frombuffer(data, np.uint8, tensor.size, tensor.offset).reshape(-1, _BLOCK_BYTES).copy()
        if kind == "skip":
            blocks[:] = 0  # what a layer adds to the residual stream is nothing
        else:
            step = 15.0 / (int(number) - 1)
            halves = (blocks[:, 4:] & 15, blocks[:, 4:] >> 4)
            low, high = (np.rint(np.rint(half / step) * step).astype(np.uint8) for half in halves)
            blocks[:, 4:] = low | (high << 4)
        data[tensor.offset : tensor.offset + tensor.size] = blocks.tobytes()
    copy = directory / f"{what.replace('=', '-')}.gguf"
    copy.write_bytes(data)
    return copy


def _is_worsened(tensor: GgufTensor, kind: str, number: int) -> bool:
    if kind == "levels":
        return True
    parts = tensor.name.split(".")
    return parts[0] == "blk" and int(parts[1]) % number == number - 1 and parts[2] in ("attn_output", "ffn_down")


def requests(
    prompts: Sequence[Prompt], arguments: argparse.Namespace, rule: Acceptance, first_seed: int
) -> list[Submit]:
    """Return one request for each prompt."""
    return [
        Submit(
            request_id=f"{rule}-{first_seed + index}",
            prompt=prompt.tokens,
            stop_tokens=prompt.stop_tokens,
            max_tokens=arguments.max_tokens,
            sampling=Sampling(arguments.temperature, top_p=arguments.top_p, seed=first_seed + index, acceptance=rule),
            depth=arguments.depth,
        )
        for index, prompt in enumerate(prompts)
    ]


def measure_rules(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Load both models and return all figures."""
    config = load_config(arguments.config)
    base = arguments.config.resolve().parent
    options = msgspec.structs.replace(engine_options(config, base), prefix_reuse=False)
    options = msgspec.structs.replace(
        options, tolerance=dataclasses.replace(options.tolerance, warmup_tokens=WARMUP_TOKENS)
    )
    source = options.model.source
    if arguments.draft != "same":
        source = str(worse(resolve(source, base).path, arguments.draft, directory))
    target = load_target(options, silent)
    drafting = options.with_model(source=source, adapter=arguments.draft_adapter, exactness="kernel").model
    draft = load_model(drafting, 2, silent).model
    prompts = read_prompts(arguments.prompts, target, arguments.limit)
    sampling = Sampling(arguments.temperature, top_p=arguments.top_p)
    plain = decode_requests(target, None, options, requests(prompts, arguments, "coupled", 0))["outputs"]
    answers = [(prompt.tokens, plain[f"coupled-{index}"]) for index, prompt in enumerate(prompts)]
    found: dict[str, Any] = {"exact": exact(target.model, draft, answers, sampling)}
    vocabulary = target.model.spec.vocabulary_size
    for rule in RULES if arguments.depth else ():
        state = DrafterState("model", "model")
        drafter = ModelDrafter(draft, state, SystemClock(), vocabulary=vocabulary, prefill_ms=1e9)
        warm_up = requests(prompts, arguments, rule, 2000) if rule == "tolerance" else ()
        found[rule] = decode_requests(target, drafter, options, requests(prompts, arguments, rule, 1000), warm_up)
        if rule == "coupled":
            repeat = decode_requests(target, None, options, requests(prompts, arguments, rule, 1000))
            if found[rule]["outputs"] != repeat["outputs"]:
                raise SystemExit("coupled acceptance changed the output")
    for rule in RULES if arguments.depth else ():
        del found[rule]["outputs"]
    return found


def main() -> None:
    """Parse arguments, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--draft", default="same")
    parser.add_argument("--draft-adapter", default="onnx_rt")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--depth", type=int, default=4, help="0: the exact figures alone")
    parser.add_argument("--config", type=Path, default=Path("cluster.yaml"))
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.temperature <= 0.0:
        parser.error("at temperature 0 the lossless rules are one; --temperature must be above 0")
    with tempfile.TemporaryDirectory() as directory:
        found = measure_rules(arguments, Path(directory))
    sampled = f"temperature {arguments.temperature:g}, top-p {arguments.top_p:g}"
    table = Table(title=f"draft {arguments.draft} on {arguments.draft_adapter}, {sampled}")
    for column in ("", "first draft accepted", "accepted / drafted", "mean acceptance length"):
        table.add_column(column)
    for name, figure in found["exact"].items():
        table.add_row(f"exact: {name}", f"{figure:.4g}", "", "")
    for rule in RULES if arguments.depth else ():
        one = found[rule]
        figures = (one["first_draft"], one["acceptance_rate"], one["mean_acceptance_length"])
        table.add_row(f"decoded: {rule}", *(f"{figure:.3f}" for figure in figures))
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
