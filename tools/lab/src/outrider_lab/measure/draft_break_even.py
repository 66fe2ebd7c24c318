"""What a draft model must be for the stores and it to beat the stores alone: a table of cost by agreement.

Replays what `outrider bench policy --record` wrote: for each place of each output the proposal of the text drafters,
with its confidences and how much of it was right, and what rounds take by their rows. Beside it stands a draft model
that is made up: it proposes a token for `cost` ms, and each is the target's own choice with the chance `agreement`.

Every round takes the draft that is worth most. With L the time of a token on average, k tokens with the chances c_i are
worth L (c_1 + c_1 c_2 + ...) less the time that drafting and their rows take. L is found by replaying until it stays:
then no other choice of drafts and depths that knows only these chances is faster (renewal reward; Ross, Applied
Probability Models, 1970). So the table is a bound: a policy that learns the chances brings less.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from outrider_lab.simulation.recording import Recording, RecordingError, load_recording
from outrider_lab.replay.recorded import RecordedRequest

COSTS_MS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0)
AGREEMENTS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
CHEAP_ROWS_MS = (12.7, 13.4, 14.1, 19.0, 20.0, 20.7, 21.3, 22.0)
"""Of 1 to 8 rows, on the other processor of docs/benchmarks.md: an Intel Xeon with AMX, activations fp32."""
WANTED = 1.08
_BINS = 20
_ROUNDS_OF_RATE = 12
_STAYS = 1e-4
_TIMES = 8
"""So often each output is replayed with a made-up model, with other dice."""


@dataclass(frozen=True, slots=True)
class Model:
    """A draft model: ms of a token it drafts, and the chance that one is the target's choice if all before it are."""

    cost_ms: float
    agreement: float


class Replay:
    """`row_ms[r]`: of a forward with r + 1 rows. Rounds have at most as many rows."""

    def __init__(self, requests: Sequence[RecordedRequest], row_ms: Sequence[float], paid_rows: int = 1) -> None:
        self._requests = list(requests)
        padded = [row_ms[max(rows, paid_rows) - 1] for rows in range(1, len(row_ms) + 1)]
        self._row_ms = padded
        self._chances = learn_chances(requests)

    def count_ms(self, model: Model | None, *, stores: bool = True) -> float:
        """Return the time of a token: with the stores' drafts, the model's, both or neither."""
        rate = self._row_ms[0]
        for _ in range(_ROUNDS_OF_RATE):
            total_ms, tokens = 0.0, 0
            for number, request in enumerate(self._requests * (_TIMES if model is not None else 1)):
                dice = random.Random(number)  # noqa: S311 -- a replay's, the same in every run
                took_ms, made = self._run(request, rate, model, dice, stores=stores)
                total_ms, tokens = total_ms + took_ms, tokens + made
            before, rate = rate, total_ms / tokens
            if abs(before - rate) <= _STAYS * rate:
                break
        return rate

    def _run(
        self, request: RecordedRequest, rate: float, model: Model | None, dice: random.Random, *, stores: bool
    ) -> tuple[float, int]:
        length = len(request.drafts)
        right = [dice.random() for _ in range(length)]  # the same places are right for every model that agrees as much
        at, total_ms = 0, 0.0
        while at < length:
            worth, took_ms, made = 0.0, self._row_ms[0], 1
            most = min(len(self._row_ms) - 1, length - at - 1)
            if stores:
                draft = request.drafts[at]
                chances = [self._chances[_bin(one)] for one in draft.confidences]
                depth, worth = self._choose(chances[:most], rate, 0.0)
                took_ms, made = self._row_ms[depth], 1 + min(depth, draft.accepted)
            if model is not None:
                depth, other = self._choose([model.agreement] * most, rate, model.cost_ms)
                if other > worth:
                    accepted = next((n for n in range(depth) if right[at + n] >= model.agreement), depth)
                    took_ms, made = self._row_ms[depth] + depth * model.cost_ms, 1 + accepted
            at, total_ms = at + made, total_ms + took_ms
        return total_ms, at

    def _choose(self, chances: Sequence[float], rate: float, cost_ms: float) -> tuple[int, float]:
        """Return the depth that is worth most, and what it is worth in ms."""
        best, worth, reached, tokens = 0, 0.0, 1.0, 0.0
        for depth, chance in enumerate(chances, start=1):
            reached *= chance
            tokens += reached
            gain = rate * tokens - (self._row_ms[depth] - self._row_ms[0]) - depth * cost_ms
            if gain > worth:
                best, worth = depth, gain
        return best, worth


def learn_chances(requests: Sequence[RecordedRequest]) -> list[float]:
    """Return how often a token with a confidence (in bins) was right where all before it were."""
    seen, right = [1.0] * _BINS, [(number + 0.5) / _BINS for number in range(_BINS)]
    for draft in (draft for request in requests for draft in request.drafts):
        for place, confidence in enumerate(draft.confidences[: draft.accepted + 1]):
            seen[_bin(confidence)] += 1
            right[_bin(confidence)] += place < draft.accepted
    return [good / count for good, count in zip(right, seen, strict=True)]


def _bin(confidence: float) -> int:
    return min(_BINS - 1, int(confidence * _BINS))


def find_agreement(replay: Replay, cost_ms: float, wanted: float) -> float | None:
    """Return the least agreement with which stores and model are `wanted` times as fast as the stores alone."""
    alone = replay.count_ms(None)
    if alone / replay.count_ms(Model(cost_ms, 1.0)) < wanted:
        return None
    low, high = 0.0, 1.0
    while high - low > 0.005:
        middle = (low + high) / 2
        enough = alone / replay.count_ms(Model(cost_ms, middle)) >= wanted
        low, high = (low, middle) if enough else (middle, high)
    return high


def read_row_ms(recording: Recording, most: int, context: float) -> list[float]:
    """Return what one sequence's forwards of 1 to `most` rows take, as they were measured for the recording."""
    return [recording.costs.forward.ms(rows, 1, context) for rows in range(1, most + 1)]


def tabulate(replay: Replay, title: str) -> tuple[Table, dict[str, object]]:
    """Return the table of one processor, and its figures."""
    alone, plain = replay.count_ms(None), replay.count_ms(None, stores=False)
    heading = f"{title}\nplain {plain:.2f} ms a token, stores alone {alone:.2f} ({plain / alone:.2f} x)"
    table = Table("ms a drafted token", *(f"agrees {one:.1f}" for one in AGREEMENTS), f"{WANTED} x from", title=heading)
    rows = []
    for cost_ms in COSTS_MS:
        gains = [alone / replay.count_ms(Model(cost_ms, one)) for one in AGREEMENTS]
        least = find_agreement(replay, cost_ms, WANTED)
        table.add_row(f"{cost_ms:g}", *(f"{one:.2f}" for one in gains), "never" if least is None else f"{least:.2f}")
        rows.append({"cost_ms": cost_ms, "gains": dict(zip(AGREEMENTS, gains, strict=True)), "least": least})
    return table, {"title": title, "plain_ms": plain, "stores_ms": alone, "rows": rows}


def main() -> None:
    """Print a table for the recording's processor, and one for a processor on which rows are cheap."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path, help="what `outrider bench policy --record` wrote")
    parser.add_argument("--most-rows", type=int, default=8, help="rows of one forward at most")
    parser.add_argument(
        "--row-ms", type=float, nargs="+", help="times of 1, 2, ... rows in place of the second table's"
    )
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    try:
        recording = load_recording(options.recording)
    except RecordingError as error:
        raise SystemExit(str(error)) from None
    requests = next(iter(recording.kinds.values()))
    context = sum(one.prompt_tokens + len(one.drafts) / 2 for one in requests) / len(requests)
    here = read_row_ms(recording, options.most_rows, context)
    other = options.row_ms or CHEAP_ROWS_MS
    told = []
    for row_ms, title in ((here, "the recording's processor"), (other, "rows of the second table")):
        print(f"{title}: " + ", ".join(f"{one:.1f}" for one in row_ms) + " ms for 1, 2, ... rows")
        table, figures = tabulate(Replay(requests, row_ms, recording.costs.paid_rows), title)
        Console(width=140).print(table)
        told.append({**figures, "row_ms": list(row_ms)})
    if options.json:
        options.json.write_text(json.dumps(told, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
