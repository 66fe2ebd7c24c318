"""The metrics of all models as one exposition: series of one name are one family, whichever model they are of."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from orchestrator.daemon.api.metrics.collector import Metrics


class MetricsPage:
    def __init__(self, models: Sequence[Metrics]) -> None:
        self._models = models
        self._registries = [
            _merge_registries([model.registry for model in models]),
            _merge_registries([model.aliases for model in models]),
        ]

    def read(self, names: Iterable[str]) -> Iterable[tuple[str, dict[str, str], float]]:
        """Yield name, labels and value of the samples of these names, as everything is now."""
        wanted = list(names)
        for model in self._models:
            model.refresh()
            for family in model.registry.restricted_registry(wanted).collect():
                for sample in family.samples:
                    yield sample.name, sample.labels, sample.value

    def render(self) -> bytes:
        for model in self._models:
            model.refresh()
        return b"".join(map(generate_latest, self._registries))

    async def answer(self) -> bytes:
        """Return the same, where streams may go on meanwhile: families are read one by one, and written in a thread."""
        for model in self._models:
            model.refresh()
            await asyncio.sleep(0)
        read = []
        for registry in self._registries:
            families = list[Metric]()
            for family in registry.collect():
                families.append(family)
                await asyncio.sleep(0)
            read.append(_Read(families))
        return await asyncio.to_thread(lambda: b"".join(map(generate_latest, read)))


class _Read(CollectorRegistry):
    def __init__(self, families: Sequence[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return iter(self._families)


def _merge_registries(registries: Sequence[CollectorRegistry]) -> CollectorRegistry:
    merged = CollectorRegistry()
    merged.register(_Families(registries))
    return merged


class _Families(Collector):
    def __init__(self, registries: Sequence[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterable[Metric]:
        if len(self._registries) == 1:
            yield from self._registries[0].collect()
            return
        families: dict[str, Metric] = {}
        for registry in self._registries:
            for family in registry.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        yield from families.values()
