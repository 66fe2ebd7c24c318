"""OpenVINO GenAI: its LLM pipeline, plain, with prompt lookup and with a draft model, and its continuous batching."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from outrider_lab.peers.contract import Answer, EngineMissing, NotOffered, PeerEngine, PeerOptions, PeerPrompt, Score
from outrider_lab.peers.convert import find_openvino_ir

LOOKUP_TOKENS, LOOKUP_NGRAM = 5, 3  # as in the engine's own sample, prompt_lookup_decoding_lm.py
DRAFTED_TOKENS = 4  # as in its sample speculative_decoding_lm.py
_BYTES_PER_GB = 1 << 30


def load(options: PeerOptions) -> PeerEngine:
    """Load the engine in one of its modes: plain, lookup, speculative, batching. Raises EngineMissing."""
    try:
        import openvino_genai
    except ImportError as error:
        raise EngineMissing("openvino_genai is not installed: pip install openvino-genai") from error
    directory = find_openvino_ir(openvino_genai, options)
    if options.mode == "batching":
        return Batching(openvino_genai, directory, options)
    return Pipeline(openvino_genai, directory, options)


class Pipeline(PeerEngine):
    """`LLMPipeline`: one request at a time."""

    def __init__(self, genai: Any, directory: Path, options: PeerOptions) -> None:
        """Load it. Raises EngineMissing where speculation lacks its draft."""
        self._genai, self._directory, self._options = genai, directory, options
        extra: dict[str, Any] = {"INFERENCE_NUM_THREADS": options.threads}
        self._config: dict[str, Any] = {}
        if options.mode == "lookup":
            extra["prompt_lookup"] = True
            self._config = {"num_assistant_tokens": LOOKUP_TOKENS, "max_ngram_size": LOOKUP_NGRAM}
        elif options.mode == "speculative":
            if not options.draft:
                raise EngineMissing("no draft model: name one with --draft")
            draft = find_openvino_ir(genai, options, draft=True)
            extra["draft_model"] = genai.draft_model(str(draft), "CPU", INFERENCE_NUM_THREADS=options.threads)
            self._config = {"num_assistant_tokens": DRAFTED_TOKENS}
        self._pipe = genai.LLMPipeline(str(directory), "CPU", **extra)

    def describe(self) -> dict[str, str]:
        asked = ", ".join(f"{name} {value}" for name, value in self._config.items())
        return describe_ir(self._directory, self._options) | ({"asked": asked} if asked else {})

    def generate(self, prompt: PeerPrompt, max_tokens: int) -> Answer:
        """See PeerEngine. The time to the first token is the engine's own, the rest our clock's."""
        config = build_config(self._genai, prompt, max_tokens, **self._config)
        started_s = time.perf_counter()
        result = self._pipe.generate(_as_tensor(prompt.tokens), config)
        last_s = time.perf_counter() - started_s
        metrics = result.perf_metrics
        steps = list(metrics.raw_metrics.m_batch_sizes) if self._config else []
        tokens = [int(token) for token in result.tokens[0]]
        accepted = len(tokens) - len(steps) if steps else None
        return Answer(tokens, metrics.get_ttft().mean / 1000.0, last_s, len(steps) or None, None, accepted)

    def generate_many(self, prompts: Sequence[PeerPrompt], max_tokens: int) -> list[Answer]:
        raise NotOffered("one request at a time: its mode for several is continuous batching")

    def score(self, tokens: Sequence[int]) -> Score:
        raise NotOffered("this pipeline tells no log-probabilities; continuous batching over the same files does")


class Batching(PeerEngine):
    """`ContinuousBatchingPipeline`, without its prefix cache. A request joins when another one ends."""

    def __init__(self, genai: Any, directory: Path, options: PeerOptions) -> None:
        self._genai, self._directory, self._options = genai, directory, options
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = max(1, math.ceil(options.kv_cache_bytes / _BYTES_PER_GB))
        scheduler.enable_prefix_caching = False
        self._pipe = genai.ContinuousBatchingPipeline(
            str(directory), scheduler, "CPU", {"INFERENCE_NUM_THREADS": options.threads}
        )
        self._requests = 0

    def describe(self) -> dict[str, str]:
        return describe_ir(self._directory, self._options)

    def generate(self, prompt: PeerPrompt, max_tokens: int) -> Answer:
        return self.generate_many([prompt], max_tokens)[0]

    def generate_many(self, prompts: Sequence[PeerPrompt], max_tokens: int) -> list[Answer]:
        """See PeerEngine. The engine is given `at_once` requests and then one for each that ends: its scheduler would
        take all that it has been given, whatever `max_num_seqs` says."""
        waiting, running = list(enumerate(prompts))[::-1], dict[int, Any]()
        found, first_s = dict[int, Answer](), dict[int, float]()
        started_s = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < self._options.at_once:
                index, prompt = waiting.pop()
                running[index] = self._add(prompt.tokens, build_config(self._genai, prompt, max_tokens))
            self._pipe.step()
            now_s = time.perf_counter() - started_s
            for index, handle in list(running.items()):
                if index not in first_s and handle.can_read():
                    first_s[index] = now_s
                if handle.get_status() != self._genai.GenerationStatus.RUNNING:
                    tokens = [int(token) for token in handle.read_all()[0].generated_ids]
                    found[index] = Answer(tokens, first_s.get(index, now_s), now_s)
                    del running[index]
        return [found[index] for index in range(len(prompts))]

    def score(self, tokens: Sequence[int]) -> Score:
        """See PeerEngine: by `echo` with `logprobs`, which tell the probability of each token, and no choices."""
        config = self._genai.GenerationConfig(max_new_tokens=1)
        config.echo, config.logprobs = True, 1
        handle = self._add(list(tokens), config)
        while handle.get_status() == self._genai.GenerationStatus.RUNNING:
            self._pipe.step()
        told = handle.read_all()[0].generated_log_probs
        return Score([float(value) for value in told[1 : len(tokens)]])

    def _add(self, tokens: list[int], config: Any) -> Any:
        self._requests += 1
        return self._pipe.add_request(self._requests, _as_tensor(tokens), config)


def build_config(genai: Any, prompt: PeerPrompt, max_tokens: int, **changes: Any) -> Any:
    """Return greedy decoding up to a stop token, where there are any; else to `max_tokens`."""
    config = genai.GenerationConfig(max_new_tokens=max_tokens)
    config.stop_token_ids = set(prompt.stop_tokens)
    config.ignore_eos = not prompt.stop_tokens
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def describe_ir(directory: Path, options: PeerOptions) -> dict[str, str]:
    """Return what the files hold, and what the device's plugin does unless it is told otherwise."""
    import openvino as ov

    core = ov.Core()
    counted: Counter[str] = Counter()
    for operation in core.read_model(str(directory / "openvino_model.xml")).get_ops():
        if operation.get_type_name() == "Constant":
            size = math.prod(operation.get_output_shape(0))
            counted[operation.get_element_type().get_type_name()] += size
    kinds = ", ".join(f"{kind} {count / 1e6:.0f}M" for kind, count in counted.most_common() if count >= 1e6)
    return {
        "version": f"openvino_genai {version('openvino-genai')}, openvino {version('openvino')}",
        "weights": kinds,
        "activations": core.get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name(),
        "kv_cache": core.get_property("CPU", "KV_CACHE_PRECISION").get_type_name(),
        "threads": str(options.threads),
    }


def _as_tensor(tokens: Sequence[int]) -> Any:
    import openvino as ov

    return ov.Tensor(np.array([list(tokens)], dtype=np.int64))
