"""Makes links to a llama-server: what it is, and whether its tokens mean what the target's do."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import psutil

from adapters.framing import ProtocolError
from adapters.tokenizer import Tokenizer
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.links.endpoint import LinkLost
from orchestrator.worker.drafting.llama_server.client import LlamaServerClient, Refused, TokenPiece
from orchestrator.worker.drafting.llama_server.link import ServerLink
from orchestrator.worker.drafting.protocol import VERSION, Welcome
from orchestrator.worker.drafting.remote.connection import Connection, Refusal
from orchestrator.worker.server_key import read_server_key
from orchestrator.worker.vocabulary_corpus import list_corpus

ADAPTER = "llama-server"
"""What states say that drafts by one run on."""
_LONGEST_SHOWN = 32  # letters of a spelling in an error


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """Where a llama-server is, and the file with the key that it wants ("": none)."""

    url: str
    key_file: str = ""


class ServerGreeter:
    """Makes connections to a llama-server for the drafter `name`. `tokenizer`: of the vocabulary that it must have."""

    def __init__(
        self, name: str, tokenizer: Tokenizer, overlap: Literal["auto", "always", "never"], answer_timeout_s: float
    ) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._overlap = overlap
        self._answer_timeout_s = answer_timeout_s

    def __call__(self, server: LlamaServer) -> Connection:
        try:
            key = read_server_key(server.key_file)
        except OSError as error:
            raise Refusal(f"the key of {server.url} cannot be read: {error}") from error
        client = LlamaServerClient(server.url, key, self._answer_timeout_s)
        try:
            return self._greet(server.url, client)
        except Refused as refused:
            client.close()
            raise Refusal(f"{server.url} refused: {refused}") from refused
        except BaseException:
            client.close()
            raise

    def _greet(self, url: str, client: LlamaServerClient) -> Connection:
        props = client.read_props()
        if props.total_slots < 1:
            raise ProtocolError(f"{url} has {props.total_slots} slots")
        size = client.read_vocabulary_size()
        try:
            for text in list_corpus(self._tokenizer):
                self._compare(url, client.tokenize(text))
        except Refused as refused:
            raise Refusal(f"{url} does not tokenize ({refused}); start a llama-server there") from refused
        way_ms = min(client.measure_way() for _ in range(3))
        apart = self._overlap == "always" or (self._overlap == "auto" and not is_here(url))
        state = DrafterState(
            self._name, "model", source=f"{props.model} on {url}", adapter=ADAPTER, weights=props.model_ftype
        )
        link = ServerLink(self._name, client, size, props.total_slots, runs_ahead=apart)
        welcome = Welcome(VERSION, state, size, "", apart, apart, most_sequences=props.total_slots)
        # An address of its own says nothing: a container on this machine has one, too.
        return Connection(link, welcome, way_ms, may_share=True)

    def _compare(self, url: str, pieces: Iterable[TokenPiece]) -> None:
        """Raise Refusal where a token id means other text there than here."""
        size = self._tokenizer.vocabulary_size
        for token in pieces:
            ours = self._tokenizer.token_bytes(token.id) if 0 <= token.id < size else b""
            if ours != token.spelling:
                raise Refusal(
                    f"{url} has another vocabulary than the target: id {token.id} is {_show(token.spelling)} there "
                    f"and {_show(ours)} here. Serve a draft of the target's family there, or set "
                    "mismatched_vocabulary: translate"
                )


def is_here(url: str) -> bool:
    """Return whether a server runs on this machine, and so takes its processor's time. Raises LinkLost where its name
    is not known."""
    host = urlsplit(url).hostname or ""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError) as error:
        raise LinkLost(f"{host}: {error}") from error
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return any(address in own or ipaddress.ip_address(str(address).split("%")[0]).is_loopback for address in addresses)


def _show(spelling: bytes) -> str:
    text = spelling.decode("utf-8", "replace")
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}...") if spelling else "none"
