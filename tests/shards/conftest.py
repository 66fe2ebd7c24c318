"""The conformance suite's models, cut into shards that stand behind sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from adapters.conformance.case import Case, Prepared, leave_clean
from adapters.conformance.fixtures import all_free as all_free
from adapters.conformance.fixtures import far as far
from adapters.conformance.fixtures import model as model
from adapters.contract import LoadedModel, LoadOptions, Progress, cut_layers
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.worker.loading.pipeline import PipelineLoader, PlacedLayers
from orchestrator.worker.shards.remote import RemoteRuntime
from tests.pipelines.conftest import LAYERS, OPENVINO, SIMULATED, Cut, InShards
from tests.pipelines.conftest import case as whole_case  # noqa: F401  # another fixture's own
from tests.pipelines.conftest import uncut as uncut
from tests.pipelines.conftest import whole as whole
from tests.support.shard_servers import Layers, serving

CUTS = [
    pytest.param((SIMULATED, "", (1, 3)), id="simulated-2"),
    pytest.param((OPENVINO, "llama3", (1, 2, 1)), id="openvino_rt-3"),
]


class BehindSockets(InShards):
    """An adapter whose models are loaded in layer shards by other workers."""

    def __init__(self, part: Prepared, counts: tuple[int, ...], endpoints: list[LinkEndpoint]) -> None:
        super().__init__([part], counts)
        self._endpoints = endpoints
        self.runtimes: list[RemoteRuntime] = []

    def load(self, prepared: Path, options: LoadOptions, progress: Progress) -> LoadedModel:
        if not self.runtimes:
            self.runtimes = [RemoteRuntime(endpoint) for endpoint in self._endpoints]
        ranges = cut_layers(self._counts, LAYERS, "the model")
        parts = [
            PlacedLayers(runtime, options.device, 0, layers, prepared)
            for runtime, layers in zip(self.runtimes, ranges, strict=True)
        ]
        return PipelineLoader(parts).load(prepared, options, progress)


@pytest.fixture(scope="session", params=CUTS)
def cut(request: pytest.FixtureRequest) -> Cut:
    """As tests/pipelines/conftest.py has it."""
    found: Cut = request.param
    return found


@pytest.fixture(scope="session")
def case(whole_case: Case) -> Case:  # noqa: F811
    """Nobody reaches into a cache that another process has."""
    return replace(whole_case, poison=leave_clean)


@pytest.fixture(scope="session")
def prepared(cut: Cut, whole: Prepared) -> Iterator[Prepared]:
    """The model, each shard behind a socket of its own, the last one over TLS."""
    counts = cut[2]
    with ExitStack() as servers:
        hosts = ["", *["127.0.0.1"] * (len(counts) - 1)]
        endpoints = [servers.enter_context(serving(Layers(whole.adapter, whole.path, LAYERS), host)) for host in hosts]
        over_tls = [replace_addresses(one) if host else one for host, one in zip(hosts, endpoints, strict=True)]
        adapter = BehindSockets(whole, counts, over_tls)
        yield replace(whole, adapter=adapter, path=whole.path / f"sockets {counts}")
        for runtime in adapter.runtimes:
            runtime.close()


def replace_addresses(endpoint: LinkEndpoint) -> LinkEndpoint:
    """Leave the addresses that other hosts have."""
    kept = [one for one in endpoint.addresses if one.startswith("tcp:")]
    return LinkEndpoint(kept, endpoint.key, endpoint.certificate)
