"""The tokenizers that the daemon translates with for one target. A worker may be on a host that shares no files with
the daemon's: each tokenizer is made in the daemon's own store, and nothing is read that a worker has written."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from adapters.contract import AdapterError
from adapters.hf_hub import HUB_PREFIX
from adapters.model_identity import ModelIdentity
from adapters.model_source import resolve
from adapters.model_store import DIGEST_DIGITS, ModelReplaced, ModelStore
from adapters.own_tokenizer import TokenizerRecipe, prepare_own_tokenizer
from adapters.served_model import find_kept
from adapters.tokenizer import Tokenizer, load_tokenizer
from adapters.vocabulary import SIMULATED_PREFIX
from orchestrator.config.target import OutputFormat
from orchestrator.daemon.sandbox.sandbox import Sandbox, SandboxedTemplate
from orchestrator.errors import DaemonError, OutriderError
from orchestrator.protocol.events import Progress
from orchestrator.protocol.ready import Ready
from orchestrator.telemetry import get_logger

_log = get_logger(__name__)


class TargetTokenizers:
    """Those of the models that a target's workers have, or are to have. Relative sources start from `base`; `store` is
    where the daemon keeps prepared models. `sandbox` runs their chat templates, `say` hears of what takes long.
    `output_format`: in which form their models write."""

    def __init__(
        self,
        base: Path,
        store: Path,
        sandbox: Sandbox,
        say: Callable[[Progress], None],
        output_format: OutputFormat = "auto",
    ) -> None:
        self._output_format = output_format
        self._base, self._store, self._sandbox, self._say = base, store, sandbox, say
        self._loaded: dict[str, Tokenizer] = {}  # by `_name_content`
        self._missing = ""
        self._reading: asyncio.Task[bool] | None = None
        self._trying: set[asyncio.Task[None]] = set()

    def end_reading(self) -> None:
        for task in (*self._trying, self._reading):
            if task is not None:
                task.cancel()

    def find_loaded(self, ready: Ready | None) -> Tokenizer | None:
        """Return the tokenizer of the model that a worker has loaded; None while it is not there. Thread-safe."""
        return self._loaded.get(_name_content(ready.model.identity)) if ready is not None else None

    def explain_missing(self, ready: Ready) -> str:
        return "" if self.find_loaded(ready) is not None else self._missing or "its tokenizer is being read"

    def forget(self) -> None:
        self._loaded = {}

    def keep(self, ready: Iterable[Ready], prepared: Tokenizer) -> None:
        """Forget those of models that no worker has, but for one that is `prepared` for those to come."""
        used = {_name_content(worker.model.identity) for worker in ready}
        self._loaded = {
            name: tokenizer for name, tokenizer in self._loaded.items() if name in used or tokenizer is prepared
        }

    def begin_reading(self, source: str) -> None:
        """Begin to read the tokenizer of what is at a model's place, unless that was done, or goes on."""
        if self._reading is None or _is_to_be_repeated(self._reading):
            reading = asyncio.to_thread(self.load_known, source)
            self._reading = asyncio.create_task(reading, name="read the tokenizer")

    def try_template(self, tokenizer: Tokenizer, target: str) -> None:
        """Try a chat template in the background, and tell the operator what every chat would be told."""
        trying = asyncio.create_task(_try_template(tokenizer, target), name="try the chat template")
        self._trying.add(trying)
        trying.add_done_callback(self._trying.discard)

    async def load_served(self, ready: Ready, worker: str, node: str) -> Tokenizer:
        """Load the tokenizer of the model that a `worker` has loaded, for people. `node`: what its cluster calls this
        host, "" where it has one only. Raises DaemonError, with both hosts and the way out."""
        if self._reading is not None:
            await asyncio.wait([self._reading])
        identity = ready.model.identity
        try:
            tokenizer = self._add("", "") if identity is None else await self.load(identity.source, identity)
        except AdapterError as error:
            host = " ".join(filter(None, (socket.gethostname(), node)))
            why = (error.why if isinstance(error, ModelReplaced) else str(error)).rstrip(".")
            source = identity.source if identity is not None else ready.model.name
            self._missing = (
                f"{source}: the daemon's host ({host}) has no tokenizer of the model that {worker or 'its worker'} has "
                f"loaded (digest {ready.model.digest}): {why}."
            )
            if isinstance(error, ModelReplaced):
                self._missing += " Put the files that the worker's host has at the same place on the daemon's host."
            raise DaemonError(self._missing) from error
        self._missing = ""
        return tokenizer

    def load_known(self, source: str) -> bool:
        """Load the tokenizer of what is at a model's place, where a worker has prepared it in this store; False while
        none has. It is found once a worker says that it has that model. Thread-safe."""
        if source.startswith((SIMULATED_PREFIX, HUB_PREFIX)):
            return True
        try:
            store, file = ModelStore(self._store), resolve(source, self._base)
            digest = None if file.parts else store.recall_digest(file)
            identity = ModelIdentity(source, (digest or "")[:DIGEST_DIGITS])
            kept = find_kept(store, identity, TokenizerRecipe()) if digest else None
            if kept is None:
                return False
            self._add(_name_content(identity), str(kept[0]))
        except (AdapterError, OSError):  # whoever asks for it again says why
            pass
        return True

    async def load(self, source: str, identity: ModelIdentity | None) -> Tokenizer:
        """Load the tokenizer of a model, of this `identity` where it is known. Raises AdapterError."""
        if source.startswith(SIMULATED_PREFIX):
            return self._add("", "")
        loop, is_awaited = asyncio.get_running_loop(), True

        def progress(stage: str, fraction: float) -> None:
            if not is_awaited:  # the daemon stops, and a large model is not read to its end for that
                raise AdapterError(f"{source}: nobody waits for its tokenizer any more")
            loop.call_soon_threadsafe(self._say, Progress(stage, fraction))

        store = ModelStore(self._store)
        try:
            directory = await asyncio.to_thread(prepare_own_tokenizer, store, source, self._base, identity, progress)
        finally:
            is_awaited = False
        name = _name_content(identity or ModelIdentity(source, directory.parent.name))
        known = self._loaded.get(name)
        return known if known is not None else await asyncio.to_thread(self._add, name, str(directory))

    def _add(self, name: str, directory: str) -> Tokenizer:
        tokenizer = load_tokenizer(directory)
        tokenizer.configured_form = None if self._output_format == "auto" else self._output_format
        tokenizer.render_by(lambda template: SandboxedTemplate(template, self._sandbox))
        return self._loaded.setdefault(name, tokenizer)


async def _try_template(tokenizer: Tokenizer, target: str) -> None:
    try:
        fault = await asyncio.to_thread(lambda: tokenizer.template_fault)
    except (OutriderError, AdapterError) as error:
        _log.warning("the chat template could not be tried", target=target, why=str(error))
        return
    if fault:
        _log.warning("the chat template is at fault: chats are refused", target=target, why=fault)


def _is_to_be_repeated(reading: asyncio.Task[bool]) -> bool:
    """Whether the task has ended, and did not find what it looked for."""
    return reading.done() and not reading.cancelled() and reading.exception() is None and not reading.result()


def _name_content(identity: ModelIdentity | None) -> str:
    """Return what tells a model's content: its digest, or its commit at a hub; "" for the simulated one."""
    if identity is None:
        return ""
    return identity.source if identity.source.startswith(HUB_PREFIX) else identity.digest
