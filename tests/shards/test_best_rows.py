"""Of rows on another host the best logits come alone, and every request gets the tokens that whole rows give it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from adapters.contract import DeviceLost, LayerRange, LoadOptions, Segment, ShardResult, silent
from adapters.pipeline import PipelineModel
from orchestrator.worker.shards.remote import RemoteRuntime
from policies.sampling import Sampling
from tests.engine.test_best_logits import BEST, submit
from tests.engine.test_flights import run_out, start
from tests.shards.conftest import replace_addresses
from tests.shards.test_shard_link import LAYERS, write_layers
from tests.support.flights import flights_over
from tests.support.loops import alone, suffix
from tests.support.shard_servers import serving
from tests.support.wrapped_model import WrappedModel

WIDE = [submit(f"wide {seed}", sampling=Sampling(2.5, top_p=0.99, seed=seed)) for seed in range(4)]


class Watched(WrappedModel):
    """Layers of which it is known how many rows came whole, and how many were read behind their forward."""

    def __init__(self, shard: Any) -> None:
        super().__init__(shard)
        self.whole = self.reads = 0

    def forward_layers(self, batch: Sequence[Segment], hidden: Any) -> ShardResult:
        result: ShardResult = self._wrapped.forward_layers(batch, hidden)
        self.whole += len(result.output)
        if result.best is None:
            return result
        read_row = result.best.read_row

        def read(row: int) -> Any:
            self.reads += 1
            return read_row(row)

        return ShardResult(result.output, result.device_ms, result.stays, result.best._replace(read_row=read))


@pytest.fixture(params=["first here", "first there too"])
def shards(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """The simulated model in two stages, the last one as on another host."""
    options = LoadOptions(device="SIM", slots=8, max_batch_rows=256, kv_cache_bytes=2048 * 16 * 1024)
    with ExitStack() as stack:
        loaded: list[Any] = []
        for number, layers in enumerate((LayerRange(0, 2), LayerRange(2, LAYERS))):
            (directory := tmp_path / str(number)).mkdir()
            source = write_layers(directory)
            if number == 0 and request.param == "first here":
                loaded.append(source.load(options, layers).shard)
                continue
            endpoint = replace_addresses(stack.enter_context(serving(source, "127.0.0.1")))
            runtime = RemoteRuntime(endpoint, stages=2)
            stack.callback(runtime.close)
            loaded.append(runtime.load_layers(Path(), options, layers, silent))
        yield loaded


@pytest.mark.parametrize(("submits", "read"), [(BEST, False), (WIDE, True)], ids=["decided", "wide"])
def test_tokens_are_those_of_whole_rows_while_other_forwards_are_under_way(shards, submits, read):
    last = Watched(shards[1])
    model = PipelineModel([shards[0], last])
    loop = flights_over(model, [suffix(), suffix()])
    out = start(loop, submits)
    assert run_out(loop, out) == ([], 2)
    assert out == alone(submits)
    assert (last.whole > 0) == read, "behind some that had to be read they come whole"
    assert (last.reads > 10) == read
    model.close()


def test_where_no_rows_are_wanted_none_come(shards):
    hidden = shards[0].forward_layers([Segment(0, 0, [5, 6], (2, 2))], None).output
    result = shards[1].forward_layers([Segment(0, 0, [5, 6], (2, 2), best=1)], hidden)
    assert result.output.shape[0] == 0


def test_a_row_that_is_gone_is_said_to_be(shards):
    hidden = [shards[0].forward_layers([Segment(0, at, [at], (0, 1))], None).output for at in range(3)]
    results = [
        shards[1].forward_layers([Segment(0, at, [at], (0, 1), best=8)], hidden[at]).best.read_row for at in range(3)
    ]
    assert [read(0).shape for read in results[1:]] == [results[1](0).shape] * 2
    with pytest.raises(DeviceLost, match="not there any more"):
        results[0](0)
