"""Layers of one model on hosts whose copies of it differ are refused at the first load."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from adapters.contract import ModelRefused, silent
from adapters.registry import get
from orchestrator.protocol.load_options import ShardOptions
from orchestrator.worker.loading.pipeline import PipelineLoader
from orchestrator.worker.loading.prepared import count_layers, prepare_model, prepare_part
from orchestrator.worker.shards.remote import RemoteRuntime
from tests.support import tiny_models
from tests.support.options import build_options
from tests.support.shard_servers import Layers, serving


def test_a_host_whose_copy_differs_is_named_with_both_digests(tmp_path: Path) -> None:
    options = build_options(tmp_path / "here", "model")
    tiny_models.write_model(tmp_path / "here" / "model", "llama")
    alike = tiny_models.write_model(tmp_path / "alike" / "model", "llama")
    other = tiny_models.write_model(tmp_path / "other" / "model", "llama")
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
    mine = ""
    for directory in (alike.parent, other.parent):
        there = prepare_part(
            msgspec.structs.replace(options, base=str(directory), store=str(directory / "store")), silent
        )
        digest, count = there.prepared.parent.name, count_layers(options, there.file)
        source = Layers(get("openvino_rt"), there.prepared, count)
        source.description = msgspec.structs.replace(source.description, where="host b pid 1", digest=digest)
        with serving(source) as endpoint:
            names = (options.adapter, options.device)
            shards = [ShardOptions(*names, 1), ShardOptions(*names, count - 1, own=True)]
            asked = msgspec.structs.replace(options, shards=shards, shard_endpoints=[endpoint])
            if directory == alike.parent:
                found = prepare_model(asked, silent)
                mine = found.prepared.parent.name
                assert mine == digest
                assert isinstance(found.adapter, PipelineLoader)
                remote = found.adapter.parts[1].adapter
                assert isinstance(remote, RemoteRuntime)
                remote.close()
                continue
            with pytest.raises(ModelRefused, match=f"host b pid 1 has a copy with the digest {digest}.*{mine}"):
                prepare_model(asked, silent)
