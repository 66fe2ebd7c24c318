"""A model whose files are replaced while it loads: weights, tokenizer and identity are of one and the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from adapters.model_store import ModelChanged
from orchestrator.protocol.failures import describe_loading_failure
from orchestrator.worker.loading.models import load_model
from tests.support import tiny_gguf
from tests.support.options import build_options
from tests.support.tiny_gguf import Tiny

WORDS = (*map(chr, range(33, 126)), "xy")
MODELS = [Tiny("llama", vocabulary=94, words=words, seed=seed) for seed, words in enumerate((WORDS, WORDS[::-1]))]


class Swap:
    """A Progress that puts another model in place when a stage begins, so many times."""

    def __init__(self, place: Path, stage: str, times: int = 1) -> None:
        self._place, self._stage, self._left = place, stage, times
        self.done = 0

    def __call__(self, stage: str, _fraction: float) -> None:
        if self._stage in stage and self._left:
            self._left -= 1
            self.done += 1
            self._place.unlink()
            tiny_gguf.write(self._place, replace(MODELS[self.done % 2], seed=self.done))


@pytest.mark.parametrize(
    "stage", ["convert", "reading the vocabulary", "writing to disk", "keeping the model's head", "load"]
)
def test_a_model_is_never_of_two_files(tmp_path: Path, stage: str) -> None:
    tiny_gguf.write(tmp_path / "m.gguf", MODELS[0])
    stages: list[str] = []
    swap = Swap(tmp_path / "m.gguf", stage)

    def progress(told: str, fraction: float) -> None:
        stages.append(told)
        swap(told, fraction)

    loaded = load_model(build_options(tmp_path, "m.gguf", activations="fp32"), 1, progress, serves=True)
    try:
        assert swap.done, stages
        assert loaded.identity is not None
        kept = [Path(loaded.tokenizer_dir), loaded.prepared]
        assert {place.parent.name for place in kept} == {loaded.identity.digest}
        assert list(kept[0].parent.glob("head-*/")), "it can be loaded again"
    finally:
        loaded.model.close()


def test_a_model_that_changes_again_and_again_is_refused_and_may_be_tried_later(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "m.gguf", MODELS[0])
    swap = Swap(tmp_path / "m.gguf", "keeping the model's head", times=99)
    with pytest.raises(ModelChanged, match="it changed while it was prepared") as refusal:
        load_model(build_options(tmp_path, "m.gguf", activations="fp32"), 1, swap, serves=True)
    assert describe_loading_failure(refusal.value).restartable
