"""What could the first depth of requests bring at most? Each request's own is chosen with hindsight.

    python -m outrider_lab.measure.first_depth REC [--orders 12] [--concurrency 1 ...] [--token-price 0.1] [--limit N]

REC is a recording of `outrider bench policy --record REC`. A single order of requests says little: the same change
gives -5 to +10 % from one order to the next. So depths are chosen by the mean time that a request takes over several
orders, and judged over other ones. `--token-price`: each token of a draft takes so much of a round, as a draft model's
does.
The finding is in docs/adr/0058-first-depth.md.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from device_profiles.cost import StepCost
from outrider_lab.simulation.recording import Recording, load_recording
from policies.speculation.adaptive import Adaptive
from policies.speculation.cost_model import start_cost_model
from policies.speculation.policy import DepthPolicy
from outrider_lab.replay.recorded import Costs, RecordedRequest
from outrider_lab.replay.run import Replay, replay
from policies.speculation.state import COLD_DEPTH

TRIED_DEPTHS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
_CONTEXT_TOKENS = 100.0
_NEWEST = 0.2  # weight of the newest request in the mean of its class


class FirstDepths(Adaptive):
    """The adaptive policy with a first depth for each request. `depth_of` is asked for it as the request begins."""

    name = "first-depths"

    def __init__(self, known: StepCost, depth_of: Callable[[str], float]) -> None:
        super().__init__(start_cost_model(known))
        self._depth_of = depth_of

    def begin(self, key: str, most: int, *, sure: bool = False) -> None:
        """See the port."""
        self.state = self.state._replace(first_depth=self._depth_of(key))
        super().begin(key, most, sure=sure)


class ClassMeans(FirstDepths):
    """Begins each request at the mean depth at which earlier ones of its category ended."""

    name = "class-means"

    def __init__(self, known: StepCost, categories: Mapping[str, str]) -> None:
        self._categories = categories
        self._means: dict[str, float] = {}
        super().__init__(known, lambda key: self._means.get(categories[key], COLD_DEPTH))

    def end(self, key: str) -> None:
        """See the port."""
        category, last = self._categories[key], self.state.requests[key].pid.integral
        mean = self._means.get(category, last)
        self._means[category] = mean + _NEWEST * (last - mean)
        super().end(key)


class Gain(NamedTuple):
    """Tokens/s over those of the constant that ships: the mean over orders, and its standard error."""

    mean: float
    error: float


class FirstDepthGains(NamedTuple):
    """What each way of choosing first depths comes to. `constants`: one for all requests. `class_means`: as a server
    learns them. The best depths of categories and of requests are chosen with hindsight. `over_class_means`: the best
    of requests beside the means of classes."""

    constants: dict[float, Gain]
    class_means: Gain
    best_of_categories: Gain
    best_of_requests: Gain
    over_class_means: Gain


def measure_first_depths(
    requests: Sequence[RecordedRequest], known: StepCost, costs: Costs, *, concurrency: int, most: int, orders: int
) -> FirstDepthGains:
    """Return the gains over so many orders, with depths chosen over as many other ones."""
    categories = {request.key: request.category for request in requests}
    chosen_in = [_shuffle(requests, seed) for seed in range(orders)]
    judged_in = [_shuffle(requests, orders + seed) for seed in range(orders)]

    def play(order: Sequence[RecordedRequest], policy: DepthPolicy) -> Replay:
        return replay(order, policy, costs, concurrency=concurrency, most=most)

    def rates(depth_of: Callable[[str], float]) -> list[float]:
        return [play(order, FirstDepths(known, depth_of)).tokens_per_s for order in judged_in]

    spent_ms = {depth: _request_ms(play, known, chosen_in, depth) for depth in TRIED_DEPTHS}
    of_request = {key: min(TRIED_DEPTHS, key=lambda depth: spent_ms[depth][key]) for key in categories}
    of_category = {
        name: min(
            TRIED_DEPTHS, key=lambda depth: sum(spent_ms[depth][key] for key in categories if categories[key] == name)
        )
        for name in set(categories.values())
    }
    shipped = rates(_always(COLD_DEPTH))
    means = [play(order, ClassMeans(known, categories)).tokens_per_s for order in judged_in]
    best = rates(of_request.__getitem__)
    return FirstDepthGains(
        {depth: _compare(rates(_always(depth)), shipped) for depth in TRIED_DEPTHS},
        _compare(means, shipped),
        _compare(rates(lambda key: of_category[categories[key]]), shipped),
        _compare(best, shipped),
        _compare(best, means),
    )


def _always(depth: float) -> Callable[[str], float]:
    return lambda _: depth


def _shuffle(requests: Sequence[RecordedRequest], seed: int) -> list[RecordedRequest]:
    return random.Random(seed).sample(requests, len(requests))  # noqa: S311  # an order, not a secret


def _request_ms(
    play: Callable[[Sequence[RecordedRequest], DepthPolicy], Replay],
    known: StepCost,
    orders: Sequence[Sequence[RecordedRequest]],
    depth: float,
) -> dict[str, float]:
    """Return the time that each request takes over all orders where every one begins at this depth."""
    played = [play(order, FirstDepths(known, _always(depth))).request_ms for order in orders]
    return {key: sum(times[key] for times in played) for key in played[0]}


def _compare(rates: Sequence[float], shipped: Sequence[float]) -> Gain:
    ratios = [rate / other for rate, other in zip(rates, shipped, strict=True)]
    return Gain(statistics.fmean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5)


def _print(recording: Recording, arguments: argparse.Namespace) -> None:
    columns = ("drafts", "at once", *(f"{depth:g} for all" for depth in TRIED_DEPTHS))
    table = Table(*columns, "class means", "best of classes", "best of requests", "over class means")
    for kind, requests in recording.kinds.items():
        for concurrency in arguments.concurrency or recording.concurrencies:
            round_ms = recording.costs.forward.ms(concurrency, concurrency, _CONTEXT_TOKENS)
            costs = replace(recording.costs, draft_token_ms=arguments.token_price * round_ms)
            gains = measure_first_depths(
                requests[: arguments.limit or None],
                recording.known,
                costs,
                concurrency=concurrency,
                most=recording.most,
                orders=arguments.orders,
            )
            cells = [*gains.constants.values(), *gains[1:]]
            table.add_row(kind, str(concurrency), *(f"{one.mean:.3f} ± {one.error:.3f}" for one in cells))
    Console(width=220).print(table)


def main() -> None:
    """Replay a recording and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--orders", type=int, default=12)
    parser.add_argument("--concurrency", type=int, nargs="*")
    parser.add_argument("--token-price", type=float, default=0.0)
    parser.add_argument("--limit", type=int, default=0)
    arguments = parser.parse_args()
    _print(load_recording(arguments.recording), arguments)


if __name__ == "__main__":
    main()
