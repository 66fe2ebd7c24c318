"""The pair matrix: every runtime as draft of every runtime as target, on the real model's first layers and real
prompts.

A runtime that is added to the registry joins by itself; one whose library is not installed is skipped by name. The
simulated model's pairs, and their faults, are in test_draft_models.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec
import pytest

from adapters import registry
from adapters.contract import AdapterError, Exactness, LoadedModel, LoadOptions, StaticShapes, silent
from adapters.model_source import ModelSource
from orchestrator.clock import SystemClock
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.chain import ChainDrafter
from orchestrator.worker.drafting.model import ModelDrafter
from policies.sampling import Sampling
from tests.support.loops import decode, loop_over, suffix

pytestmark = pytest.mark.model
RUNTIMES = [name for name in registry.names() if name != "simulated"]
RUNTIMES += [f"{name}/static" for name in registry.static_names()]
SAMPLED = Sampling(0.8, top_p=0.95, seed=7)
FEW_GRAPHS = StaticShapes(on=True, context_tokens=256, prefill_rows=64, verify_rows=(4,))  # each takes seconds to build
PROMPTS, TOKENS = 2, 24
_DEPTH = 3


class Loaded:
    """Each runtime once as a target and once as a draft, loaded when it is first wanted."""

    def __init__(self, store, file) -> None:
        self._store, self._file = store, file
        self._models: dict[tuple[str, Exactness], LoadedModel] = {}
        self.expected: dict[str, dict[str, list[int]]] = {}

    def model(self, runtime: str, exactness: Exactness) -> LoadedModel:
        key = (runtime, exactness)
        if key not in self._models:
            name, _, static = runtime.partition("/")
            shapes = FEW_GRAPHS if static else StaticShapes()
            try:
                cpu = next(device.name for device in registry.get(name).devices() if device.kind == "cpu")
                adapter = registry.get_for(name, cpu, shapes)
            except (AdapterError, StopIteration) as error:
                pytest.skip(f"{runtime}: {error or 'it has no CPU device'}")
            options = LoadOptions(
                device=cpu,
                exactness=exactness,
                slots=4,
                max_batch_rows=256,
                kv_cache_bytes=256 << 20,
                static=shapes,
            )
            self._models[key] = adapter.load(self._store.prepare(self._file, adapter, silent), options, silent)
        return self._models[key]

    def close(self) -> None:
        for model in self._models.values():
            model.close()


@pytest.fixture(scope="module")
def loaded(store, first_layers_path) -> Iterator[Loaded]:
    every = Loaded(store, ModelSource(first_layers_path, "default", str(first_layers_path)))
    yield every
    every.close()


@pytest.fixture(scope="module")
def submits(prompts) -> list[Submit]:
    """The shortest prompts, each greedily and sampled, in one batch."""
    return [
        Submit(f"{name}-{index}", prompt, TOKENS, sampling, stop_tokens=[0, 2])
        for index, prompt in enumerate(sorted(prompts, key=len)[:PROMPTS])
        for name, sampling in (("greedy", Sampling()), ("sampled", SAMPLED))
    ]


def alone(loaded: Loaded, runtime: str, submits: list[Submit]) -> dict[str, list[int]]:
    """What target-only decoding makes of each request alone."""
    known = loaded.expected.setdefault(runtime, {})
    if missing := [submit for submit in submits if submit.request_id not in known]:
        model = loaded.model(runtime, Exactness.BIT)
        known |= decode(loop_over(model, None, running=1, prefix_reuse=False), missing)[0]
    return {submit.request_id: known[submit.request_id] for submit in submits}


@pytest.mark.parametrize(
    ("target", "draft", "chained"),
    [
        *(pytest.param(*pair, False, id="-".join(pair)) for pair in itertools.product(RUNTIMES, RUNTIMES)),
        *(pytest.param(name, name, True, id=f"{name}-behind-suffix") for name in RUNTIMES),
    ],
)
def test_a_pair_gives_what_the_target_alone_gives(loaded, submits, target, draft, chained):
    if "/static" in target + draft:  # one sequence a forward, and a row costs ten times as much
        submits = submits[:2]
    expected = alone(loaded, target, submits)
    drafting = loaded.model(draft, Exactness.KERNEL)
    model = ModelDrafter(
        drafting,
        DrafterState("model", "model", adapter=draft),
        SystemClock(),
        vocabulary=loaded.model(target, Exactness.BIT).spec.vocabulary_size,
        prefill_ms=500.0,
    )
    loop = loop_over(loaded.model(target, Exactness.BIT), ChainDrafter([suffix(), model]) if chained else model)
    if not chained:  # whatever drafting costs on this machine: a few drafts alone would be judged by chance
        submits = [msgspec.structs.replace(submit, depth=_DEPTH) for submit in submits]
    out, _ = decode(loop, submits)
    assert out == expected
    state = loop.gauges(0).drafters[-1]
    assert state.state == "ok"
    if not chained:  # in a chain it drafts only where the text has nothing
        assert state.accepted > 0.6 * state.drafted > 0, f"{state.accepted} of {state.drafted}"
    assert drafting.free_blocks() == drafting.capabilities.total_blocks
