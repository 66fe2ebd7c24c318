"""llama.cpp's own server, started here over the target's GGUF file: plain, with n-gram lookup and with a draft model.

It is llama-server on PATH, else the server in the wheel of xllamacpp (outrider_lab.peers.llama_builds). It is asked by
its native `/completion`, with tokens in and tokens out (tools/server/README.md of llama.cpp).
"""

from __future__ import annotations

import math
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import httpx

from adapters.contract import AdapterError
from adapters.gguf_splits import list_first_files
from adapters.parent_process import end_with_parent
from outrider_lab.free_port import end_server, find_free_port, wait_until_served
from outrider_lab.peers.contract import NATIVE, Answer, EngineMissing, PeerEngine, PeerOptions, PeerPrompt, Score
from outrider_lab.peers.llama_builds import LlamaBuild, find_server, judge_build, name_build, read_instructions

LOOKUP_NGRAM, LOOKUP_TOKENS = 3, 5  # as openvino_genai's lookup; the server's own 12 and 48 hardly ever match a chat
DRAFTED_TOKENS = 4
TOKENS_A_SLOT = 4096
_FORCED = 1000.0
"""A bias that no logit exceeds: the server says the token, and tells its probability as it was without the bias."""
_LEAST_PROBABILITY = 2.0**-149  # of float32, in which the server computes it
_READY_S = 180.0
_TIMEOUT_S = 600.0
_TAIL_LINES = 3


class LlamaServerFailed(AdapterError):
    """The server ended, refused a request or was not ready in time; the message says which, and what it printed."""


def load(options: PeerOptions) -> LlamaServer:
    """Start a server in a mode: plain, lookup, speculative. Raises EngineMissing, LlamaServerFailed."""
    build = find_server()
    command, url = build_command(build, options)
    log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - the server writes as long as it lives
    # Nothing runs between fork and exec but this, and nothing else ends a server whose client was killed.
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        preexec_fn=end_with_parent,  # noqa: PLW1509
    )
    try:
        if not wait_until_served(server, f"{url}/health", _READY_S):
            code = server.poll()
            why = f"was not ready within {_READY_S:.0f} s"
            if code is not None:
                why = f"ended with exit code {code} before it was ready"
            raise LlamaServerFailed(f"it {why}{read_tail(log)}")
        return LlamaServer(options, build, command, server, url, log)
    except BaseException:
        end_server(server)
        log.close()
        raise


def build_command(build: LlamaBuild, options: PeerOptions) -> tuple[list[str], str]:
    """Return the command that starts the server on a free port, and its address. Each slot has room for 4096 tokens.

    Raises EngineMissing where a file that it reads is missing."""
    port = find_free_port()
    sizes = ["-t", str(options.threads), "-c", str(TOKENS_A_SLOT * options.at_once), "-np", str(options.at_once)]
    where = ["--host", "127.0.0.1", "--port", str(port)]
    command = [*build.command, "-m", str(find_gguf(options.directory or options.source)), *sizes, *where]
    if options.mode == "lookup":
        command += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(LOOKUP_NGRAM)]
        command += ["--spec-ngram-simple-size-m", str(LOOKUP_TOKENS)]
    elif options.mode == "speculative":
        if not options.draft:
            raise EngineMissing("no draft model: name one with --draft")
        command += ["--spec-type", "draft-simple", "-md", str(find_gguf(options.draft))]
        command += ["--spec-draft-n-max", str(DRAFTED_TOKENS)]
    return command, f"http://127.0.0.1:{port}"


def find_gguf(source: str) -> Path:
    """Return the GGUF file: `source`, or the only model in that directory. Raises EngineMissing."""
    path = Path(source)
    if path.is_file():
        return path
    found = list_first_files(file.name for file in path.iterdir()) if path.is_dir() else []
    if len(found) == 1:
        return path / found[0]
    raise EngineMissing(
        f"llama.cpp reads GGUF files, and {path.name} has {len(found) or 'none'}: convert the model with llama.cpp's"
        " convert_hf_to_gguf.py and give the directory of that one file with --model-of llama.cpp=DIR"
    )


class LlamaServer(PeerEngine):
    """A server that runs. Requests find no earlier prefill (`cache_prompt`), but for those that score."""

    def __init__(
        self,
        options: PeerOptions,
        build: LlamaBuild,
        command: list[str],
        server: subprocess.Popen[bytes],
        url: str,
        log: IO[bytes],
    ) -> None:
        """Take a server that is ready, with what it is and the command that started it."""
        self._options, self._build, self._command, self._server, self._log = options, build, command, server, log
        self._client = httpx.Client(base_url=url, timeout=_TIMEOUT_S)
        self._asking = ThreadPoolExecutor(options.at_once)

    def describe(self) -> dict[str, str]:
        """See PeerEngine: of the weights what the server says of its file."""
        told = self._client.get("/props").json()
        name = Path(str(told.get("model_path", self._options.source))).name
        asked = " ".join(self._command[self._command.index("--port") + 2 :])
        return {
            "version": f"llama.cpp, build {name_build(self._build, str(told.get('build_info', '')))}",
            "program": self._build.program,
            NATIVE: judge_build(read_instructions(self._build)),
            "weights": f"{told.get('model_ftype', 'as in the file')} ({name}, as in the file)",
            "activations": "int8 in groups of 32 within products, else f32 (ggml's CPU backend)",
            "kv_cache": "f16",
            "threads": str(self._options.threads),
            "command": " ".join(self._command),
        } | ({"asked": asked} if asked else {})

    def generate(self, prompt: PeerPrompt, max_tokens: int) -> Answer:
        """See PeerEngine. The answer comes whole, as a stream leaves out tokens within a character. The first token
        came when the server's own time for the others began."""
        return self._ask(prompt, max_tokens, time.perf_counter())

    def generate_many(self, prompts: Sequence[PeerPrompt], max_tokens: int) -> list[Answer]:
        """See PeerEngine: `at_once` requests are on the way together."""
        began_s = time.perf_counter()
        return list(self._asking.map(lambda prompt: self._ask(prompt, max_tokens, began_s), prompts))

    def score(self, tokens: Sequence[int]) -> Score:
        """See PeerEngine. The server tells no probabilities of a prompt, but those of the token that it says: each one
        is forced by a bias, behind the text before it, which it still has."""
        found, choices = list[float](), list[int]()
        for index in range(1, len(tokens)):
            forced = {"logit_bias": [[tokens[index], _FORCED]], "n_probs": 1, "cache_prompt": True, "id_slot": 0}
            told = self._post({"prompt": list(tokens[:index]), "n_predict": 1, **forced})
            (one,) = told["completion_probabilities"]
            if one["id"] != tokens[index]:
                raise LlamaServerFailed(f"it said token {one['id']}, not {tokens[index]}, whatever the bias")
            found.append(bound_logprob(float(one["logprob"])))
            choices.append(int(one["top_logprobs"][0]["id"]))
        return Score(found, choices)

    def close(self) -> None:
        self._asking.shutdown(cancel_futures=True)
        self._client.close()
        end_server(self._server)
        self._log.close()

    def _ask(self, prompt: PeerPrompt, max_tokens: int, began_s: float) -> Answer:
        fields = {"n_predict": max_tokens, "cache_prompt": False, "ignore_eos": not prompt.stop_tokens}
        told = self._post({"prompt": prompt.tokens, **fields})
        last_s = time.perf_counter() - began_s
        tokens, times = [int(token) for token in told["tokens"]], told["timings"]
        first_s = max(0.0, last_s - float(times["predicted_ms"]) / 1000.0)
        if self._options.mode == "plain":
            return Answer(tokens, first_s, last_s)
        drafted, accepted = int(times.get("draft_n", 0)), int(times.get("draft_n_accepted", 0))
        return Answer(tokens, first_s, last_s, max(1, len(tokens) - accepted), drafted, accepted)

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        greedy = {"temperature": 0.0, "top_k": 1, "samplers": ["top_k"], "return_tokens": True}
        try:
            response = self._client.post("/completion", json=greedy | body)
        except httpx.HTTPError as error:
            with suppress(subprocess.TimeoutExpired):
                self._server.wait(1.0)
            code = self._server.returncode
            why = f"it ended with exit code {code}" if code is not None else f"it does not answer ({error})"
            raise LlamaServerFailed(f"{why}{read_tail(self._log)}") from error
        if response.status_code != httpx.codes.OK:
            raise LlamaServerFailed(f"it refused a request ({response.status_code}): {response.text[:300]}")
        told: dict[str, Any] = response.json()
        return told


def bound_logprob(told: float) -> float:
    """Return a log-probability. Where one is 0 in float32 the server tells the least number instead of minus infinity:
    it is at most the least probability above 0, which stands for it."""
    return max(told, math.log(_LEAST_PROBABILITY))


def read_tail(log: IO[bytes]) -> str:
    """Return the last lines that the server printed, those with errors where there are some; "" for none."""
    with suppress(OSError, ValueError):
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
        named = [line for line in lines if "error" in line.lower()]
        if lines:
            return ": " + " / ".join((named or lines)[-_TAIL_LINES:])
    return ""
