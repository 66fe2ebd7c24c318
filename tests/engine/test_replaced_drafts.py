"""A draft model that was replaced while its target is served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from adapters.contract import silent
from adapters.model_identity import ModelIdentity
from orchestrator.config.load import load_config
from orchestrator.config.sources import FoundSources
from orchestrator.fitting.worker_options import engine_options
from orchestrator.protocol.load_options import RemoteOptions
from orchestrator.worker.loading.drafters import Remotes, build_drafter
from orchestrator.worker.loading.models import load_target
from tests.support import tiny_gguf
from tests.support.tiny_gguf import Tiny

MODEL = replace(Tiny("llama", vocabulary=94), words=(*map(chr, range(33, 126)), "xy"))


@pytest.mark.parametrize("translate", [False, True])
@pytest.mark.parametrize("remote", [None, RemoteOptions("other", "never", 1.0, 1.0)])
def test_a_draft_that_was_replaced_and_is_nowhere_costs_its_drafts_only(
    tmp_path: Path, translate: bool, remote: RemoteOptions | None
) -> None:
    for name in ("m.gguf", "d.gguf"):
        tiny_gguf.write(tmp_path / name, MODEL)
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: {source: m.gguf, activations: fp32, exactness: kernel}\nlimits: {kv_cache: 16 MiB, max_running: 1}\n"
        "drafts: [{method: model, source: d.gguf, kv_cache: 16 MiB, activations: fp32}]\n"
        f"store: {{directory: '{tmp_path}/store'}}\n"
    )
    config = load_config(path)
    gone = FoundSources(identities={"d.gguf": ModelIdentity("d.gguf", "0" * 16)})
    options = engine_options(config.with_sources(gone), tmp_path)
    (draft,) = options.drafters
    options = msgspec.structs.replace(
        options, drafters=[msgspec.structs.replace(draft, translate=translate, remote=remote)]
    )
    target = load_target(options, silent)
    try:
        drafter = build_drafter(options, target, remotes=Remotes(lambda link: None))
        assert drafter is not None
        if remote is not None and not translate:  # its worker says so, when it is attached
            assert [state.state for state in drafter.states()] != ["failed"]
            return
        (state,) = drafter.states()
        assert (state.name, state.state) == ("model", "failed")
        assert "d.gguf: this daemon serves the model with the digest 0000000000000000" in state.reason
        drafter.close()
    finally:
        target.model.close()
