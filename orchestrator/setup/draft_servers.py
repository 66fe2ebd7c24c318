"""Servers of other machines that could draft for a target: llama-servers with a small model of its vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from adapters.framing import ProtocolError
from adapters.gguf_header import read_header
from adapters.model_source import resolve
from adapters.tokenizer import Tokenizer, load_tokenizer
from adapters.tokenizer_gguf import write_gguf_tokenizer
from adapters.tokenizer_hf import write_hf_tokenizer
from orchestrator.protocol.links.endpoint import LinkLost
from orchestrator.setup.proposal import DRAFT_SHARE, Candidate
from orchestrator.setup.servers import LocalServer
from orchestrator.worker.drafting.llama_server.greeting import LlamaServer, ServerGreeter, is_here
from orchestrator.worker.drafting.remote.connection import Refusal
from orchestrator.worker.endpoint.dialects import LLAMA_SERVER

_ANSWERS_WITHIN_S = 20.0  # as `drafts[].answer_timeout_s` is by default


@dataclass(frozen=True, slots=True)
class DraftServer:
    """A server, and why it cannot draft for the target, "" where it can."""

    server: LocalServer
    problem: str = ""


def list_draft_servers(target: Candidate, servers: Sequence[LocalServer], path: Path) -> list[DraftServer]:
    """Return the llama-servers of other machines whose model has half of a target's parameters at most, the smallest
    first. Each is asked whether its tokens mean what the target's do. Raises what reading the target's files raises."""
    smaller = [
        server
        for server in sorted(servers, key=count_parameters)
        if server.engine == LLAMA_SERVER
        and 0 < count_parameters(server) <= DRAFT_SHARE * target.parameters
        and is_elsewhere(server)
    ]
    if not smaller:
        return []
    greeter = ServerGreeter("draft", _read_tokenizer(target, path.parent), "auto", _ANSWERS_WITHIN_S)
    return [DraftServer(server, _find_problem(greeter, server)) for server in smaller]


def count_parameters(server: LocalServer) -> int:
    """Return the parameters of a server's only model; 0 where it has several, or does not tell."""
    return server.models[0].parameters if len(server.models) == 1 else 0


def is_elsewhere(server: LocalServer) -> bool:
    """Return whether a server runs on another machine, so that it takes nothing of this one's time and memory."""
    try:
        return not is_here(server.url)
    except LinkLost:
        return False


def _find_problem(greeter: ServerGreeter, server: LocalServer) -> str:
    try:
        greeter(LlamaServer(server.url, server.key_file)).link.close()
    except (Refusal, ProtocolError, LinkLost) as error:
        return str(error)
    return ""


def _read_tokenizer(target: Candidate, base: Path) -> Tokenizer:
    file = resolve(target.model.source, base, _ignore)
    with TemporaryDirectory() as directory:
        if file.path.is_dir():
            write_hf_tokenizer(file.path, Path(directory), _ignore)
        else:
            write_gguf_tokenizer(read_header(file.path, file.whole_bytes), Path(directory), _ignore)
        return load_tokenizer(directory)


def _ignore(_stage: str, _fraction: float) -> None:
    pass
