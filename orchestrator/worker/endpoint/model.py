"""What an endpoint's worker has of the target itself: its tokenizer, and what it says of the server as a replica."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from adapters.errors import ModelRefused
from adapters.hf_hub import HUB_PREFIX
from adapters.model_identity import ModelIdentity
from adapters.model_source import check_model
from adapters.model_store import ModelStore
from adapters.tokenizer import Tokenizer, byte_texts, load_tokenizer
from adapters.tokenizer_files import META_FILE
from adapters.vocabulary import SIMULATED_PREFIX
from device_profiles.units import ceil_div
from device_profiles.workload import vocabulary_fingerprint
from orchestrator.protocol.abilities import BEGUN_GRAMMAR, BEGUN_PENALTIES, OWN_SAMPLERS
from orchestrator.protocol.links.endpoint import host_id
from orchestrator.protocol.load_options import EndpointOptions, ModelOptions
from orchestrator.protocol.ready import ENDPOINT, Ready, ReadyDevice, ReadyKv, ReadyModel, ReadyPrecision
from orchestrator.worker.endpoint.detection import ServerFacts
from orchestrator.worker.loading.prepared import OnProgress, find_model, prepare_own_tokenizer, prepare_tokenizer_of

BLOCK_TOKENS: Final = 16
"""Of a KV cache that nobody here sees: load is counted in them."""
# Where neither the server nor the files say more: most models of today have it.
_USUAL_CONTEXT: Final = 4096
# As many as a digest of a model has.
_DIGITS: Final = 16


@dataclass(frozen=True, slots=True)
class EndpointModel:
    """The target as this process has it. `digest`: "" where its files are not here. `context_tokens`: of the model."""

    name: str
    digest: str
    identity: ModelIdentity | None
    tokenizer: Tokenizer
    fingerprint: str
    context_tokens: int

    def find_context(self, facts: ServerFacts) -> int:
        """Return the longest sequence at a server."""
        return facts.context_tokens or self.context_tokens


def prepare_endpoint_model(options: ModelOptions, progress: OnProgress) -> EndpointModel:
    """Prepare (once) the target's tokenizer. Raises what adapters raise."""
    source, identity = options.source, options.identity
    if source.startswith(SIMULATED_PREFIX):
        name, fingerprint = options.name or "simulated-toy", vocabulary_fingerprint(byte_texts())
        return EndpointModel(name, source, None, load_tokenizer(""), fingerprint, _USUAL_CONTEXT)
    context = _USUAL_CONTEXT
    if source.startswith(HUB_PREFIX):  # by its small files: nobody here needs the weights
        directory = prepare_own_tokenizer(options, progress)
        name, digest = Path(source).name, identity.digest if identity is not None else ""
    else:
        store = ModelStore(Path(options.store))
        file = find_model(options, store, progress)
        directory = prepare_tokenizer_of(options, file, progress, store)
        name, digest = file.name, Path(directory).parent.name
        identity = identity or ModelIdentity(source, digest, file.name, file.source)
        with suppress(ModelRefused):  # of a family that only the server runs
            context = check_model(file).context_length
    meta = json.loads((Path(directory) / META_FILE).read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(directory)
    return EndpointModel(options.name or name, digest, identity, tokenizer, meta["vocabulary_fingerprint"], context)


def build_ready(options: EndpointOptions, model: EndpointModel, facts: ServerFacts, load_s: float) -> Ready:
    """Return what a server is as a replica: of a group of its own, which its address, build and model make."""
    own = hashlib.sha256(f"{options.url}\0{facts.identity}".encode()).hexdigest()[:_DIGITS]
    formats = facts.formats or "not told"
    context, slots = model.find_context(facts), count_slots(options, facts)
    ids = "token ids" if facts.takes_ids else "text"
    answers = "token ids" if facts.gives_ids else "text"
    return Ready(
        ReadyModel(
            name=model.name,
            vocabulary_size=model.tokenizer.vocabulary_size,
            vocabulary_fingerprint=model.fingerprint,
            context_tokens=context,
            digest=model.digest,
            source=options.model.source,
            identities=[model.identity] if model.identity is not None else [],
        ),
        ReadyDevice(adapter=ENDPOINT, name=options.url, full_name=facts.title),
        ReadyPrecision(
            weights=formats,
            activations="not told",
            kv_cache="not told",
            exactness=options.exactness,
            row_invariant=options.exactness == "bit",
            reason=f"prompts go there as {ids}, answers come as {answers}",
            numerical_class=facts.title,
            class_fingerprint=own,
            class_reason="an endpoint is a group of its own",
        ),
        ReadyKv(blocks=slots * ceil_div(context, BLOCK_TOKENS), block_tokens=BLOCK_TOKENS),
        slots=slots,
        pid=os.getpid(),
        load_s=load_s,
        host=host_id(),
        cannot=sorted(list_inabilities(facts)),
    )


def count_slots(options: EndpointOptions, facts: ServerFacts) -> int:
    """Return how many requests a server has at a time."""
    return min(options.max_running, facts.slots) if facts.slots else options.max_running


def list_inabilities(facts: ServerFacts) -> set[str]:
    """Return what requests may ask for and this server does not do, by the names of `Ready.cannot`."""
    kinds = {f"grammar {kind}" for kind in ("json_schema", "regex", "lark") if kind not in facts.dialect.grammars}
    return {*facts.dialect.cannot, *kinds, *OWN_SAMPLERS, BEGUN_GRAMMAR, BEGUN_PENALTIES}
