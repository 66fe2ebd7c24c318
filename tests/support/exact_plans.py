"""The best plan in layer shards, proven: a mixed-integer program for each drafter, depth and number of micro-batches.

Columns:

- How many layers each device runs.
- Which devices follow each other: a path through all that are used, and one arc from its end back to its start.
- Which device drafts.

The objective is the time of a round as policies/planning/throughput.py has it, which is linear once drafter, depth and
micro-batches are fixed. For instances of up to some ten devices with one option for the target each; as in the planner,
a device with a shard does not draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from math import ceil, inf

from device_profiles.link import LinkProfile
from device_profiles.profile import Exactness
from device_profiles.units import MS_PER_S
from policies.planning.draft_yield import all_hit_rate, compute_draft_length_shares, depth_bound, tokens_per_round
from policies.planning.placement.links import Links, links_of
from policies.planning.placement.workers import room_bytes, sum_fixed_bytes
from policies.planning.plan import Device, DrafterFacts, Inventory, ModelFacts, Option, PlanGoal, Role
from policies.planning.shard_cost import ModelPart, context_tokens, kv_bytes, micro_batch_counts
from policies.planning.throughput import DraftSide, draft_link_ms, draft_ms
from tests.support.integer_program import Program

_MOST_MS = 1e7


@dataclass(frozen=True, slots=True)
class _Case:
    """What one program is about."""

    devices: tuple[Device, ...]
    target: dict[str, Option]
    drafts: dict[str, Option]
    links: Links
    wanted: PlanGoal
    drafter: DrafterFacts | None
    depth: int
    micro_batches: int

    @property
    def tokens(self) -> float:
        """Of all sequences in a round."""
        return self.wanted.workload.concurrency * tokens_per_round(self.drafter, self.depth)

    @property
    def prompts(self) -> float:
        """How many requests' prefill a round has a share of."""
        return self.tokens / self.wanted.workload.output_tokens / self.micro_batches


def best_in_shards(cluster: Inventory, wanted: PlanGoal) -> float:
    """Return the tokens per second of the best plan in two or more layer shards with all requests running at once, 0
    where there is none.

    Raises RuntimeError where the solver gives up.
    """
    load, best = wanted.workload, 0.0
    devices = tuple(sorted(cluster.devices, key=lambda one: one.id))
    options = {role: {one.profile: one for one in cluster.options if one.role is role} for role in Role}
    for drafter, depth in _depths(wanted):
        for count in micro_batch_counts(load.concurrency):
            case = _Case(
                devices, options[Role.TARGET], options[Role.DRAFT], links_of(cluster), wanted, drafter, depth, count
            )
            best = max(best, _rate(case, best))
    return best


def _depths(wanted: PlanGoal) -> Iterator[tuple[DrafterFacts | None, int]]:
    yield None, 0
    for drafter in wanted.workload.drafters:
        for depth in range(1, depth_bound(wanted.workload, drafter) + 1):
            yield drafter, depth


def _rate(case: _Case, best: float) -> float:
    """Return the tokens per second of the best plan of one program; 0 where none is faster than `best`."""
    program = Program()
    _path(program, case)
    _memory(program, case)
    always_ms = _round(program, case)
    if best:  # nothing slower is of interest, and to know it is quicker
        program.below(case.tokens * MS_PER_S / best - always_ms)
    least_ms = program.least_cost()
    return 0.0 if least_ms is None else case.tokens * MS_PER_S / (least_ms + always_ms)


def _path(program: Program, case: _Case) -> None:
    """One path through the devices that are used, and an arc back (Miller, Tucker and Zemlin's places forbid rings)."""
    names, most = [one.id for one in case.devices], float(len(case.devices))
    arcs = list(permutations(names, 2))
    for name in names:
        used = program.column(("used", name))
        for end in (0, 1):
            around = [program.column((kind, *arc)) for kind in ("next", "back") for arc in arcs if arc[end] == name]
            program.row([(used, -1.0), *((column, 1.0) for column in around)], 0.0, 0.0)
    program.row([(program.column(("back", *arc)), 1.0) for arc in arcs], 1.0, 1.0)
    for one, other in arcs:
        first = program.column(("place", one), most, integer=False)
        after = program.column(("place", other), most, integer=False)
        program.row([(after, 1.0), (first, -1.0), (program.column(("next", one, other)), -most)], 1.0 - most, inf)
    limits = case.wanted.constraints
    low, high = (limits.shards, limits.shards) if limits.shards else (2, limits.max_shards)
    program.row([(program.column(("used", name)), 1.0) for name in names], float(low), float(high))


def _memory(program: Program, case: _Case) -> None:
    load, columns = case.wanted.workload, []
    for device in case.devices:
        option = case.target[device.profile]
        room = room_bytes(device, case.wanted.constraints) - sum_fixed_bytes(option, 0)
        a_layer = option.layer_bytes + kv_bytes(option, load, 1 / load.target.layers) * load.concurrency
        most = float(max(0.0, min(load.target.layers, room // a_layer)))
        layers, used = program.column(("layers", device.id), most), program.column(("used", device.id))
        program.row([(layers, 1.0), (used, -most)], -inf, 0.0)
        program.row([(layers, 1.0), (used, -1.0)], 0.0, inf)
        columns.append((layers, 1.0))
    program.row(columns, float(load.target.layers), float(load.target.layers))


def _round(program: Program, case: _Case) -> float:
    """Set the objective; return the part of a round that is the same for every plan."""
    drafter, load = case.drafter, case.wanted.workload
    mean = [
        (_verification(program, case, f"verify {count}", count), share)
        for count, share in compute_draft_length_shares(drafter, case.depth)
    ]
    _prefill(program, case)
    if drafter is not None and drafter.model is not None:
        _drafting(program, case, drafter, drafter.model, mean)
        return 0.0
    for column, share in mean:
        program.cost(column, share)
    return draft_ms(DraftSide(drafter), load, case.depth, load.concurrency) if drafter is not None else 0.0


def _verification(program: Program, case: _Case, name: str, depth: int) -> int:
    """Return the column of its time: at least the sum, and at least the slowest shard times the micro-batches."""
    load, total = case.wanted.workload, program.column(name, _MOST_MS, integer=False)
    sequences = ceil(load.concurrency / case.micro_batches)
    entries, rows = [(total, 1.0)], 0
    for device in case.devices:
        option = case.target[device.profile]
        mine = sequences * max(depth + 1, option.min_rows if load.exactness is Exactness.BIT else 1)
        rows = max(rows, mine)
        whole = ModelPart(option, 1.0, device.utilisation).ms(mine, sequences, context_tokens(load))
        fixed = ModelPart(option, 0.0, device.utilisation).ms(mine, sequences, context_tokens(load))
        layers, used = program.column(("layers", device.id)), program.column(("used", device.id))
        by_layer = (whole - fixed) / load.target.layers
        entries += [(layers, -by_layer), (used, -fixed)]
        slowest = [(layers, -case.micro_batches * by_layer), (used, -case.micro_batches * fixed)]
        program.row([(total, 1.0), *slowest], 0.0, inf)
    entries += [(column, -ms) for column, ms in _hops(program, case, load.target.hidden_bytes * rows)]
    program.row(entries, 0.0, inf)
    return total


def _hops(program: Program, case: _Case, size_bytes: float) -> Iterator[tuple[int, float]]:
    for one, other in permutations(case.devices, 2):
        link: LinkProfile = case.links.between(one.host, other.host)
        yield program.column(("next", one.id, other.id)), link.transfer_ms(size_bytes)
        yield program.column(("back", one.id, other.id)), link.rtt_ms / 2


def _prefill(program: Program, case: _Case) -> None:
    load = case.wanted.workload
    beside = load.concurrency > 1
    for device in case.devices:
        option = case.target[device.profile]
        whole = ModelPart(option, 1.0, device.utilisation).prefill_ms(load.prompt_tokens, beside=beside)
        fixed = ModelPart(option, 0.0, device.utilisation).prefill_ms(load.prompt_tokens, beside=beside)
        program.cost(program.column(("layers", device.id)), case.prompts * (whole - fixed) / load.target.layers)
        program.cost(program.column(("used", device.id)), case.prompts * fixed)
    for column, ms in _hops(program, case, load.target.hidden_bytes * load.prompt_tokens):
        program.cost(column, case.prompts * ms)


def _drafting(
    program: Program, case: _Case, drafter: DrafterFacts, model: ModelFacts, verify: list[tuple[int, float]]
) -> None:
    """One device without a shard drafts; a round takes all_hit * max(verify, drafting) + (1 - all_hit) * (verify +
    drafting again + the link between it and the last shard)."""
    load = case.wanted.workload
    all_hit, missed = all_hit_rate(drafter, case.depth, load.concurrency)
    beside, drafting = program.column("beside", _MOST_MS, integer=False), []
    for device in case.devices:
        option = case.drafts[device.profile]
        needed = sum_fixed_bytes(option, model.layers) + kv_bytes(option, load) * load.concurrency
        fits = room_bytes(device, case.wanted.constraints) >= needed
        here = program.column(("draft", device.id), 1.0 if fits else 0.0)
        program.row([(here, 1.0), (program.column(("used", device.id)), 1.0)], 0.0, 1.0)
        side = DraftSide(drafter, ModelPart(option, 1.0, device.utilisation), True)
        drafting.append((here, draft_ms(side, load, case.depth, load.concurrency)))
        program.cost(here, (1.0 - all_hit) * draft_ms(side, load, case.depth, missed))
        _asking(program, case, device, here, 1.0 - all_hit)
    program.row([(column, 1.0) for column, _ in drafting], 1.0, 1.0)
    program.row([(beside, 1.0), *((column, -ms) for column, ms in drafting)], 0.0, inf)
    program.row([(beside, 1.0), *((column, -share) for column, share in verify)], 0.0, inf)
    program.cost(beside, all_hit)
    for column, share in verify:
        program.cost(column, (1.0 - all_hit) * share)


def _asking(program: Program, case: _Case, draft: Device, here: int, missed: float) -> None:
    """Pay for the link between a draft and whichever shard is the last, in the share of rounds that `missed`."""
    for last in case.devices:
        link = case.links.between(draft.host, last.host)
        asks = program.column(("asks", last.id, draft.id), integer=False)
        ends = [program.column(("back", last.id, other.id)) for other in case.devices if other.id != last.id]
        program.row([(asks, 1.0), (here, -1.0), *((column, -1.0) for column in ends)], -1.0, inf)
        program.cost(asks, missed * draft_link_ms(link.rtt_ms, link.bytes_per_s, case.wanted.workload.concurrency))
