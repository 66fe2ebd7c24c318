"""Which engines a comparison runs, and how each is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from adapters.model_source import ModelSource, resolve
from orchestrator.protocol.load_options import EngineOptions
from outrider_lab.bench.compare.endpoint import EndpointOptions
from outrider_lab.bench.compare.figures import CONTROL, OUTRIDER
from outrider_lab.bench.compare.outrider_engine import OutriderOptions
from outrider_lab.bench.compare.process import EngineSpec
from outrider_lab.bench.errors import BenchError
from outrider_lab.peers.catalogue import PEERS, Peer
from outrider_lab.peers.contract import PeerOptions

_OUTRIDER_ENTRY = "outrider_lab.bench.compare.outrider_engine:load"
_ALIASES = {"llama-server": "llama.cpp", "llama_cpp": "llama.cpp"}
_ENDPOINT_ENTRY = "outrider_lab.bench.compare.endpoint:load"


@dataclass(frozen=True, slots=True)
class Asked:
    """What is compared. `source` and `tokenizer` are the target's files. `only`: engines beside Outrider, empty for all
    that are known. `weights`: formats in which Outrider runs plainly, too. `directories`: models in an engine's own
    form. `draft`: a draft model for engines that take one."""

    options: EngineOptions
    source: ModelSource
    tokenizer: str
    threads: int
    at_once: int
    only: Sequence[str] = ()
    weights: Sequence[str] = ()
    endpoints: Mapping[str, str] = field(default_factory=dict)
    directories: Mapping[str, str] = field(default_factory=dict)
    draft: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


def names() -> list[str]:
    """Return the engines that `--engine` knows beside endpoints."""
    return [peer.name for peer in PEERS]


def list_engines(asked: Asked) -> list[EngineSpec]:
    """Return what is to be loaded, Outrider first. Raises BenchError."""
    known = [*names(), *asked.endpoints]
    only = [_ALIASES.get(name, name) for name in asked.only]
    modes = [f"{peer.name}:{mode}" for peer in PEERS for mode in peer.modes]
    for name in [*only, *asked.directories]:
        allowed = modes if ":" in name and name in only else known
        if name not in allowed:
            raise BenchError(f"there is no engine {name!r}: write one of {', '.join(allowed)} (Outrider always runs)")
    specs = _list_outrider(asked)
    for peer in PEERS:
        its = _list_modes(peer, asked)
        specs += [one for one in its if not only or peer.name in only or f"{peer.name}:{one.mode}" in only]
    for name, url in asked.endpoints.items():
        if not only or name in only:
            options = EndpointOptions(url, "", asked.tokenizer, dict(asked.headers), at_once=asked.at_once)
            specs.append(EngineSpec(name, "endpoint", _ENDPOINT_ENTRY, options, serves=True))
    return specs


def _list_outrider(asked: Asked) -> list[EngineSpec]:
    engine = asked.options
    modes = {"plain": (engine, False), CONTROL: (engine, False)}
    modes |= {f"plain, weights {one}": (engine.with_model(weights=one), False) for one in asked.weights}
    if engine.drafters and engine.max_depth:
        modes["speculative"] = (engine, True)
    return [
        EngineSpec(OUTRIDER, mode, _OUTRIDER_ENTRY, OutriderOptions(msgspec.to_builtins(options), speculate))
        for mode, (options, speculate) in modes.items()
    ]


def _list_modes(peer: Peer, asked: Asked) -> list[EngineSpec]:
    work = Path(asked.options.model.store) / "peers"
    draft = resolve(asked.draft, Path()).path if asked.draft else None
    return [
        EngineSpec(
            peer.name,
            mode,
            peer.entry,
            PeerOptions(
                mode,
                str(asked.source.path),
                asked.tokenizer,
                str(work),
                asked.threads,
                directory=asked.directories.get(peer.name, ""),
                draft=str(draft or ""),
                at_once=asked.at_once,
                kv_cache_bytes=asked.options.model.kv_cache_bytes,
            ),
            serves=peer.serves,
        )
        for mode in peer.modes
        if draft is not None or mode not in peer.needs_draft
    ]
