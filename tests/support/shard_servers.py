"""Workers for layers in threads of this process, behind real sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adapters.contract import LayerRange, LoadedShard, LoadOptions, NumericalClass
from orchestrator.protocol.commands import Stop
from orchestrator.protocol.events import ShardReady
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.worker.shards.protocol import VERSION, Description
from orchestrator.worker.shards.server import LoadedLayers, ShardEngine


class Layers:
    """Implements shards.server.LayerSource over an adapter and what it has prepared. `loaded`: all that it did."""

    def __init__(self, adapter: Any, prepared: Path, layers: int, version: int = VERSION) -> None:
        self._adapter, self._prepared = adapter, prepared
        self.description = Description(version, adapter.name, "", "", layers, "", "a thread", 1)
        self.loaded: list[LoadedShard] = []

    def classes(self, options: LoadOptions) -> list[list[NumericalClass]]:
        return [list(tier) for tier in self._adapter.classes(options)]

    def load(self, options: LoadOptions, layers: LayerRange) -> LoadedLayers:
        shard: LoadedShard = self._adapter.load_layers(self._prepared, options, layers, lambda stage, done: None)
        self.loaded.append(shard)
        return LoadedLayers(shard)


@contextmanager
def serving(source: Layers, host: str = "") -> Iterator[LinkEndpoint]:
    """Serve layers on a Unix socket, and on TCP with TLS where a host is given."""
    found: list[LinkEndpoint] = []
    ready = threading.Event()

    def hear(event: object) -> None:
        if isinstance(event, ShardReady):
            found.append(event.endpoint)
            ready.set()

    engine = ShardEngine(lambda emit: source, host)
    thread = threading.Thread(target=engine.run, args=(hear,))
    thread.start()
    try:
        assert ready.wait(60)
        yield found[0]
    finally:
        engine.submit(Stop())
        thread.join(60)
        assert not thread.is_alive()
