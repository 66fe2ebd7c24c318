"""Token trees beside the best chain: what they would bring, and what they do to bits.

    python -m outrider_lab.token_trees record --prompts FILE --out OUTPUTS [--limit 65] [--max-tokens 96]
                                        [--temperature 0.8] [--config FILE]
    python -m outrider_lab.token_trees replay OUTPUTS [--texts DATA] [--curve NAME:MOST=ROWS:MS,...]... [--fork-ms 0.1]
    python -m outrider_lab.token_trees model [--curve ...]... [--by-rank 0.68,0.09,0.04,0.03,0.01]... [--draft-token 0 0.1]
    python -m outrider_lab.token_trees bits [--config FILE] [--times]

DATA is what `python -m outrider_lab.distill generate` wrote. The findings are in docs/adr/0088-token-trees.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from adapters.contract import AdapterError
from orchestrator.drafting.passages import Passages, write_passages
from orchestrator.errors import OutriderError
from orchestrator.generating.data import Shards
from outrider_lab.token_trees.candidates import Sources, list_candidates, load_outputs
from outrider_lab.token_trees.record import record_outputs, save_outputs
from outrider_lab.token_trees.replay import WAYS, Curve, Recorded, calibrate, compare, compare_by_category, play
from outrider_lab.token_trees.shapes import count_expected_tokens

CURVES = {
    "AVX-512": Curve(((1, 7.3), (2, 7.7), (3, 8.2), (5, 9.2), (8, 10.9), (16, 16.1)), 24),
    "AMX, fp32": Curve(((1, 12.7), (2, 13.4), (3, 14.1), (4, 19.0), (5, 20.0), (8, 22.0), (16, 26.0)), 24),
    "AVX2": Curve(((1, 10.5), (2, 12.3), (3, 15.3), (4, 18.2), (5, 27.5), (8, 32.3), (16, 46.5), (32, 76.4)), 32),
    "flat to 16": Curve(((1, 10.0), (16, 10.0)), 16),
    "flat to 64": Curve(((1, 10.0), (64, 10.0)), 64),
}
"""Measured, openvino_rt and the default model; and what a GPU is like whose forwards wait for weights."""
BY_RANK = (
    "0.68,0.09,0.04,0.03,0.01",
    "0.4,0.1,0.05,0.03",
    "0.5,0.12,0.06,0.03",
    "0.8,0.09,0.03,0.015",
    "0.9,0.055,0.015",
)
"""Chances that the target's choice is a draft model's first, second, ... candidate. The first ones are of the kind that
SpecInfer (arXiv 2305.09781) states for LLaMA 68M as the draft of 7B."""
_DEEPEST = 12
_FORK_SLOTS = 17
_RATIO = "{:.3f}"


def _parse_curve(text: str) -> tuple[str, Curve]:
    head, _, points = text.partition("=")
    name, _, most = head.partition(":")
    try:
        found = [(int(rows), float(ms)) for rows, _, ms in (point.partition(":") for point in points.split(","))]
        curve = Curve(tuple(found), int(most))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:MOST=ROWS:MS,ROWS:MS,...") from None
    if len(found) < 2 or found != sorted(found):
        raise argparse.ArgumentTypeError(f"{text!r} has not two points or more with ascending rows")
    return name, curve


def _record(arguments: argparse.Namespace) -> None:
    err = Console(stderr=True)
    with err.status("decoding") as status:
        outputs = record_outputs(
            arguments.config,
            arguments.prompts,
            limit=arguments.limit,
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            tell=lambda count: status.update(f"{count} outputs"),
        )
    save_outputs(outputs, arguments.out)
    err.print(f"{len(outputs)} outputs, {sum(len(one.tokens) for one in outputs)} tokens, in {arguments.out}")


def _replay(arguments: argparse.Namespace) -> None:
    outputs = load_outputs(arguments.outputs)
    console = Console(width=180)
    with tempfile.TemporaryDirectory() as work:
        sources = {"suffix": Sources(suffix=True, statistics=None)}
        if arguments.texts:
            texts = [text.tokens[text.head :].tolist() for text in Shards(arguments.texts).texts()]
            write_passages(Path(work) / "texts", texts, vocabulary="", source="")
            passages = Passages(Path(work) / "texts")
            console.print(f"statistics: {len(texts)} texts, {sum(map(len, texts))} tokens")
            sources["statistics"] = Sources(suffix=False, statistics=passages)
            sources["both"] = Sources(suffix=True, statistics=passages)
        for name, source in sources.items():
            recorded = calibrate(outputs, list(list_candidates(outputs, source)))
            console.print(_rank_hits(name, recorded))
            console.print(_replay_table(name, recorded, arguments))


def _rank_hits(name: str, recorded: list[Recorded]) -> str:
    """Say how often the target's next token is the first, second and third candidate."""
    hits, places = [0, 0, 0], 0
    for output, every, _ in recorded:
        for place, candidates in enumerate(every):
            places += 1
            for one in candidates:
                if one.depth == 0 and one.rank < len(hits) and one.token == output.tokens[place]:
                    hits[one.rank] += 1
    return (
        f"{name}: candidate 1, 2, 3 is the target's choice in {', '.join(_RATIO.format(hit / places) for hit in hits)}"
    )


def _replay_table(name: str, recorded: list[Recorded], arguments: argparse.Namespace) -> Table:
    heads = ("curve", "plain /s", "chain /s", "its rows", "tree / chain", "promised", "its rows", "forks / chain")
    table = Table(*heads, "forks a round", "tree / chain by category", title=f"candidates: {name}")
    for label, curve in dict(arguments.curve or CURVES.items()).items():
        played = {way: play(recorded, choose, curve, arguments.fork_ms) for way, choose in WAYS.items()}
        plain, chain, tree, forks = played.values()
        gain, forked = compare(tree, chain), compare(forks, chain)
        categories = compare_by_category(recorded, tree, chain)
        table.add_row(
            label,
            f"{plain.tokens_per_s:.1f}",
            f"{chain.tokens_per_s:.1f}",
            f"{chain.rows / chain.rounds:.1f}",
            f"{gain.replayed:.3f} ± {gain.error:.3f}",
            _RATIO.format(gain.expected),
            f"{tree.rows / tree.rounds:.1f}",
            f"{forked.replayed:.3f} ± {forked.error:.3f}",
            f"{forks.forks / forks.rounds:.1f}",
            ", ".join(f"{category} {ratio:.2f}" for category, ratio in sorted(categories.items())),
        )
    return table


def _model(arguments: argparse.Namespace) -> None:
    table = Table(
        "chances by rank", "curve", "a draft token / plain round", "chain /s", "depth", "tree / chain", "depth", "rows"
    )
    for text in arguments.by_rank or BY_RANK:
        by_rank = [float(chance) for chance in text.split(",")]
        for label, curve in dict(arguments.curve or CURVES.items()).items():
            tokens = count_expected_tokens(by_rank, curve.most_rows, _DEEPEST)
            for share in arguments.draft_token:
                draft_ms = share * curve.row_ms(1)
                chains, trees = [], []
                for depth in range(_DEEPEST + 1):
                    expected = sum(by_rank[0] ** count for count in range(depth + 1))
                    if depth < curve.most_rows:
                        chains.append((expected / (curve.row_ms(1 + depth) + draft_ms * depth), depth))
                    for rows in range(1, curve.most_rows + 1):
                        trees.append((tokens[depth][rows] / (curve.row_ms(rows) + draft_ms * depth), depth, rows))
                (chain, depth), (tree, tree_depth, rows) = max(chains), max(trees, key=lambda one: (one[0], -one[2]))
                cells = (f"{1000 * chain:.1f}", str(depth), _RATIO.format(tree / chain), str(tree_depth), str(rows))
                table.add_row(text, label, f"{share:g}", *cells)
    Console(width=180).print(table)


def _bits(arguments: argparse.Namespace) -> None:
    from adapters.openvino_rt.convert import MODEL_FILE
    from orchestrator.config.load import load_config
    from orchestrator.loading.models import load_model, silent
    from orchestrator.loading.options import engine_options
    from outrider_lab.token_trees.bits import PagedGraph, compare_shapes, count_torch_rows, time_forks, time_rows

    options = engine_options(load_config(arguments.config), arguments.config.resolve().parent).model
    options = msgspec.structs.replace(options, adapter="openvino_rt", exactness="bit")
    loaded = load_model(options, _FORK_SLOTS, silent)
    chosen = loaded.model.capabilities.numerical_class
    console = Console(width=180)
    console.print(f"{loaded.name}, {chosen}")
    path = loaded.prepared / MODEL_FILE
    plain, masked = (PagedGraph(path, chosen, masked=one) for one in (False, True))
    table = Table("tree", "rows", "other bits than in a chain", "other choices", "greatest difference")
    for one in compare_shapes(plain, masked, loaded.model.spec.vocabulary_size):
        table.add_row(one.shape, str(one.rows), str(one.other), str(one.choices), f"{one.most:.2g}")
    console.print(table)
    other, rows = count_torch_rows()
    console.print(f"torch attention on the CPU, masked keys in between: other bits in {other} of {rows} tiles")
    loaded.model.close()
    if arguments.times:
        times = Table("rows", "chain, ms", "chain in the graph with a mask", "binary tree")
        for rows, ms in time_rows(plain, masked, (1, 2, 3, 4, 5, 8, 16, 32)):
            times.add_row(str(rows), *(f"{one:.2f}" for one in ms))
        console.print(times)
        for adapter in ("openvino_rt", "torch_device"):
            model = load_model(msgspec.structs.replace(options, adapter=adapter), _FORK_SLOTS, silent).model
            for count, ms_all in time_forks(model, (1, 4, _FORK_SLOTS - 1)):
                console.print(f"{adapter}: {count} forks begun and ended: {ms_all:.2f} ms")
            model.close()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    record = commands.add_parser("record", help="let the target answer prompts")
    record.add_argument("--prompts", type=Path, required=True)
    record.add_argument("--out", type=Path, required=True)
    record.add_argument("--limit", type=int, default=65)
    record.add_argument("--max-tokens", type=int, default=96)
    record.add_argument("--temperature", type=float, default=0.0)
    record.add_argument("--config", type=Path, default=Path("cluster.yaml"))
    record.set_defaults(run=_record)
    replay = commands.add_parser("replay", help="play recorded outputs along chains, trees and forks")
    replay.add_argument("outputs", type=Path)
    replay.add_argument("--texts", type=Path, help="what the model wrote elsewhere, for its statistics")
    replay.add_argument("--fork-ms", type=float, default=0.0, help="what it takes to begin a forked sequence")
    replay.set_defaults(run=_replay)
    model = commands.add_parser("model", help="Sequoia's trees for a draft model of stated chances")
    model.add_argument("--by-rank", action="append")
    model.add_argument("--draft-token", type=float, nargs="+", default=[0.0, 0.1, 0.25])
    model.set_defaults(run=_model)
    for one in (replay, model):
        one.add_argument("--curve", type=_parse_curve, action="append")
    bits = commands.add_parser("bits", help="compare the rows of trees with those of chains on this processor")
    bits.add_argument("--config", type=Path, default=Path("cluster.yaml"))
    bits.add_argument("--times", action="store_true")
    bits.set_defaults(run=_bits)
    return parser.parse_args()


def main() -> int:
    """Run a command; a failure is one line on standard error and exit code 1."""
    arguments = _parse()
    try:
        arguments.run(arguments)
    except (OutriderError, AdapterError, OSError, msgspec.MsgspecError) as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
