"""A draft that another host loads: the target's host reads its vocabulary, and makes its tokenizer, without weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from adapters.hf_directory import WHOLE_FILE
from tests.adapters.test_hf_hub import environment
from tests.support import tiny_gguf, tiny_models
from tests.support.hub_server import Hub, serving
from tests.support.tiny_gguf import Tiny

WORDS = (*map(chr, range(33, 126)), "xy")
# In a process of its own, because the hub's library reads its environment once, when it is imported.
PAIR = """
import json, sys
from pathlib import Path
from adapters.model_identity import ModelIdentity
from adapters.tokenizer import load_tokenizer
from orchestrator.protocol.load_options import ModelDraftOptions
from orchestrator.worker.loading.drafters import prepare_tokenizer, remote_pair
from tests.support.options import build_options
base, source = Path(sys.argv[1]), sys.argv[2]
for identity in (None, ModelIdentity(source, "0" * 16)):
    model = build_options(base, source, identity=identity)
    draft = ModelDraftOptions("draft", "drafts[0]", model, 10.0, translate=True)
    pair = remote_pair(draft, build_options(base, "m.gguf"), None)
    print(json.dumps([pair.match.value, load_tokenizer(prepare_tokenizer(draft)).vocabulary_size]))
"""


def test_a_translated_draft_of_the_hub_costs_the_targets_host_no_weights(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "m.gguf", Tiny("llama", vocabulary=len(WORDS), words=WORDS))
    directory = tiny_models.write_model(tmp_path / "draft", "qwen3")
    with serving(Hub({"org/draft": {path.name: path.read_bytes() for path in directory.iterdir()}})) as hub:
        done = subprocess.run(
            [sys.executable, "-c", PAIR, str(tmp_path), f"hf:org/draft@{hub.commit('org/draft')}"],
            env=environment(hub, tmp_path / "home"),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert [json.loads(line) for line in done.stdout.splitlines()] == [["differs", tiny_models.VOCABULARY]] * 2
        assert hub.list_ranges(WHOLE_FILE) == []
