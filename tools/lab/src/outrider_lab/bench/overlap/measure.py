"""One pair of target and draft: plain, drafts made before each verification, and drafts made while it runs, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from adapters.contract import silent
from device_profiles.units import MS_PER_S
from orchestrator.clock import SystemClock
from orchestrator.config.model import ClusterConfig
from orchestrator.errors import OutriderError
from orchestrator.fitting.worker_options import draft_specs, engine_options
from orchestrator.machine.cores import pin_to_cores
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.load_options import DraftWorkerOptions, EngineOptions, ModelDraftOptions, RemoteOptions
from orchestrator.recommend.record import ModeRun, Prompt, measure_decoding, tpot_ms
from orchestrator.recommend.run import encode_prompts, warm_up
from orchestrator.worker.drafting.chain import ChainDrafter
from orchestrator.worker.drafting.port import Ask
from orchestrator.worker.drafting.remote.connection import WorkerGreeter
from orchestrator.worker.drafting.remote.drafter import RemoteDrafter, RemoteLimits
from orchestrator.worker.loading.drafters import remote_pair
from orchestrator.worker.loading.engine import build_loop
from orchestrator.worker.loading.models import LoadedSource, load_target
from orchestrator.worker.measuring.prompts import PromptText
from outrider_lab.bench.draft_process import hear_process, start_draft_process
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.summary import figures
from policies.models.vocabulary import Match
from policies.sampling import Sampling

OVERLAP = {"sequential": "never", "overlapped": "always"}
"""The ways of drafting that are compared, and what each is called in cluster.yaml."""
_CONNECT_WITHIN_S = 30.0
_PROBES = 5
_PROBE_TOKENS = 8
_PROBE_READS = 1000  # of 10 ms: a busy machine reads slowly


@dataclass(frozen=True, slots=True)
class OverlapPair:
    """A target and its draft, as sections of cluster.yaml, each with cores of its own (none: all). `stated`: what is
    known of it beforehand, for the row of the result."""

    target: dict[str, Any]
    draft: dict[str, Any]
    target_cores: tuple[int, ...] = ()
    draft_cores: tuple[int, ...] = ()
    stated: tuple[tuple[str, float | str], ...] = ()

    def configure(self, overlap: str) -> tuple[EngineOptions, DraftWorkerOptions]:
        """Return the options of both processes. Raises ConfigError."""
        draft = {**self.draft, "method": "model", "process": "own", "overlap": overlap, "cores": list(self.draft_cores)}
        config = ClusterConfig.model_validate(
            {
                "model": self.target,
                "drafts": [draft],
                "devices": {"cores": list(self.target_cores)},
            }
        )
        options = engine_options(config, Path())
        (spec,) = draft_specs(options, config)
        # All ways decode the same prompts in turn: none may find another's prefill done.
        return msgspec.structs.replace(options, prefix_reuse=False), msgspec.convert(spec.options, DraftWorkerOptions)


def measure_pair(
    pair: OverlapPair, texts: Sequence[PromptText], max_tokens: int, *, all_cores: bool = True
) -> dict[str, Any]:
    """Return a row of the result, with the target on all cores, too, where that is wanted. Raises BenchError where
    something cannot be loaded, AdapterError and ConfigError."""
    with ExitStack() as stack:
        endpoints: dict[str, LinkEndpoint] = {}
        for name, overlap in OVERLAP.items():
            _, worker = pair.configure(overlap)
            endpoints[name] = stack.enter_context(start_draft_process(worker, pair.draft_cores))
        row = _ask_process(pair, endpoints, texts, max_tokens)
    if all_cores and pair.target_cores and pair.draft_cores:
        every = tuple(sorted({*pair.target_cores, *pair.draft_cores}))
        whole = OverlapPair(pair.target, pair.draft, every, ())
        row["plain_all_cores_tokens_per_s"] = _ask_process(whole, {}, texts, max_tokens)["plain_tokens_per_s"]
    return dict(pair.stated) | row


def _ask_process(
    pair: OverlapPair, endpoints: dict[str, LinkEndpoint], texts: Sequence[PromptText], max_tokens: int
) -> dict[str, Any]:
    row: dict[str, Any]
    with hear_process("the target", _measure, pair, endpoints, list(texts), max_tokens) as row:
        return row


def _measure(
    pair: OverlapPair,
    endpoints: dict[str, LinkEndpoint],
    texts: Sequence[PromptText],
    max_tokens: int,
    told: Connection[Any, Any],
) -> None:
    try:
        pin_to_cores(pair.target_cores)
        options, _ = pair.configure("never")
        target = load_target(options, silent)
        told.send(_measure_ways(target, options, endpoints, texts, max_tokens))
    except OutriderError as error:
        told.send(str(error))


def _measure_ways(
    target: LoadedSource,
    options: EngineOptions,
    endpoints: dict[str, LinkEndpoint],
    texts: Sequence[PromptText],
    max_tokens: int,
) -> dict[str, Any]:
    drafters = {name: connect_drafter(target, options, endpoint) for name, endpoint in endpoints.items()}
    chains = {name: ChainDrafter([drafter]) for name, drafter in drafters.items()}
    prompts = encode_prompts(texts, target)
    for chain in chains.values():
        warm_up(target, options, chain)
    pass_ms = _measure_pass_ms(drafters["sequential"], prompts[0]) if drafters else 0.0
    ways = {name: ModeRun("spec" if name in chains else "plain") for name in ("plain", *chains)}
    loops = {name: build_loop(target, options, chains.get(name)) for name in ways}
    waited_ms = dict.fromkeys(ways, 0.0)
    for number, prompt in enumerate(prompts):
        submit = Submit(f"{number}-{prompt.key}", prompt.tokens, max_tokens, stop_tokens=prompt.stop_tokens)
        turn = number % len(ways)
        for name in [*ways][turn:] + [*ways][:turn]:
            before_ms = _read_wait_ms(drafters.get(name))
            measure_decoding(loops[name], [submit], ways[name])
            waited_ms[name] += _read_wait_ms(drafters.get(name)) - before_ms
    hits = {name: _read_hit_share(drafter) for name, drafter in drafters.items()}
    for chain in chains.values():
        chain.close()
    target.model.close()
    return _describe(ways, waited_ms, pass_ms, hits)


def connect_drafter(target: LoadedSource, options: EngineOptions, endpoint: LinkEndpoint) -> RemoteDrafter:
    """Return the drafter behind an endpoint, connected. Raises BenchError."""
    draft = next(one for one in options.drafters if isinstance(one, ModelDraftOptions))
    remote = draft.remote or RemoteOptions("", "auto", 100.0, 20.0)
    compared = remote_pair(draft, options.model, target)
    if compared.match is Match.DIFFERS:
        raise BenchError(f"{draft.name} has another vocabulary than the target: choose a draft of the target's family")
    states: list[str] = []
    drafter = RemoteDrafter(
        draft.name,
        greet=WorkerGreeter(compared.draft_fingerprint, target.model.capabilities.device),
        limits=RemoteLimits(remote.max_wait_ms, remote.answer_timeout_s),
        clock=SystemClock(),
        report=lambda link: states.append(link.state),
    )
    drafter.attach(endpoint)
    end_s = time.monotonic() + _CONNECT_WITHIN_S
    while "connected" not in states:
        if time.monotonic() > end_s:
            raise BenchError(f"the draft worker cannot be reached: {drafter.states()[0].reason}")
        time.sleep(0.01)
    return drafter


def _measure_pass_ms(drafter: RemoteDrafter, prompt: Prompt) -> float:
    """Return what a draft token takes where a round waits for it. Raises BenchError."""
    key, tokens = "probe", [*prompt.tokens]
    drafter.begin(key, tokens, Sampling())
    took_ms: list[float] = []
    for _ in range(_PROBE_READS):
        started_s = time.perf_counter()
        (draft,) = drafter.propose([Ask(key, _PROBE_TOKENS)])
        if draft.tokens:
            took_ms.append((time.perf_counter() - started_s) * MS_PER_S / len(draft.tokens))
            drafter.extend(key, [*draft.tokens, prompt.tokens[len(took_ms)]])
        else:
            time.sleep(0.01)  # it reads the prompt
        if len(took_ms) == _PROBES + 1:
            drafter.end(key, keep=False)
            return statistics.median(took_ms[1:])
    raise BenchError(f"no drafts came from {drafter.name}: {drafter.states()[0].reason or 'it proposes nothing'}")


def _read_wait_ms(drafter: RemoteDrafter | None) -> float:
    remote = drafter.states()[0].remote if drafter is not None else None
    return remote.wait_ms if remote is not None else 0.0


def _read_hit_share(drafter: RemoteDrafter) -> float:
    remote = drafter.states()[0].remote
    tried = remote.ahead_hits + remote.ahead_misses if remote is not None else 0
    return remote.ahead_hits / tried if remote is not None and tried else 0.0


def _describe(
    ways: dict[str, ModeRun], waited_ms: dict[str, float], pass_ms: float, hits: dict[str, float]
) -> dict[str, Any]:
    plain = list(ways["plain"].records.values())
    row: dict[str, Any] = {"pass_ms": pass_ms, "tokens": sum(len(record.tokens) for record in plain)}
    for name, run in ways.items():
        taken_ms = tpot_ms(run.records.values())
        row[f"{name}_tokens_per_s"] = MS_PER_S / taken_ms if taken_ms else 0.0
    if len(ways) == 1:
        return row
    tokens = [[record.tokens for record in run.records.values()] for run in ways.values()]
    drafted = {
        name: sum(record.stats.drafted for record in run.records.values() if record.stats) for name, run in ways.items()
    }
    used_ms = drafted["overlapped"] * pass_ms
    return row | {
        "acceptance_rate": figures(plain, list(ways["overlapped"].records.values()))["acceptance_rate"],
        "drafted": drafted["overlapped"],
        "sequential_drafted": drafted["sequential"],
        "wait_ms": waited_ms["overlapped"],
        "sequential_wait_ms": waited_ms["sequential"],
        "ready_share": hits["overlapped"],
        "hidden_share": 1.0 - waited_ms["overlapped"] / used_ms if used_ms else None,
        "vs_plain": row["overlapped_tokens_per_s"] / row["plain_tokens_per_s"],
        "sequential_vs_plain": row["sequential_tokens_per_s"] / row["plain_tokens_per_s"],
        "vs_sequential": row["overlapped_tokens_per_s"] / row["sequential_tokens_per_s"],
        "identical": all(one == tokens[0] for one in tokens),
    }
