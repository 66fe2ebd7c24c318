"""ONNX Runtime GenAI, with the 4-bit model that its own builder makes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from adapters.quality import log_probabilities
from outrider_lab.peers.contract import Answer, EngineMissing, NotOffered, PeerEngine, PeerOptions, PeerPrompt, Score
from outrider_lab.peers.convert import find_onnx_genai


def load(options: PeerOptions) -> OnnxGenai:
    """Load the engine. Raises EngineMissing."""
    try:
        import onnxruntime_genai
    except ImportError as error:
        raise EngineMissing("onnxruntime_genai is not installed: pip install onnxruntime-genai") from error
    return OnnxGenai(onnxruntime_genai, find_onnx_genai(options), options.threads)


class OnnxGenai(PeerEngine):
    """A generator for each request, on as many threads as the other engines have: left alone it takes half of them."""

    def __init__(self, genai: Any, directory: Path, threads: int) -> None:
        self._genai, self._directory, self._threads = genai, directory, threads
        config = genai.Config(str(directory))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self._model = genai.Model(config)

    def describe(self) -> dict[str, str]:
        """See PeerEngine; of the weights what the directory's graph has."""
        weights, kept = describe_graph(self._directory)
        return {
            "version": f"onnxruntime_genai {version('onnxruntime-genai')}, onnxruntime {version('onnxruntime')}",
            "weights": weights,
            "activations": kept,
            "kv_cache": kept,
            "threads": str(self._threads),
        }

    def generate(self, prompt: PeerPrompt, max_tokens: int) -> Answer:
        stop = set(prompt.stop_tokens)
        tokens: list[int] = []
        started_s = time.perf_counter()
        generator = self._open(prompt.tokens, max_tokens)
        first_s = 0.0
        while len(tokens) < max_tokens and not (tokens and tokens[-1] in stop):
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
            first_s = first_s or time.perf_counter() - started_s
        return Answer(tokens, first_s, time.perf_counter() - started_s)

    def generate_many(self, prompts: Sequence[PeerPrompt], max_tokens: int) -> list[Answer]:
        raise NotOffered("a generator's batch takes prompts of one length only")

    def score(self, tokens: Sequence[int]) -> Score:
        rows = np.asarray(self._open(tokens[:-1], 1).get_output("logits"))[0]
        if len(rows) != len(tokens) - 1:
            raise NotOffered("this graph gives logits of the last token alone")
        return Score(log_probabilities(rows, tokens[1:]), [int(token) for token in rows.argmax(axis=1)])

    def _open(self, tokens: Sequence[int], max_tokens: int) -> Any:
        settings = self._genai.GeneratorParams(self._model)
        settings.set_search_options(max_length=len(tokens) + max_tokens, do_sample=False)
        generator = self._genai.Generator(self._model, settings)
        generator.append_tokens(np.array([list(tokens)], dtype=np.int32))
        return generator


def describe_graph(directory: Path) -> tuple[str, str]:
    """Return the weights of the matrix products, and the element type of what goes between them."""
    try:
        import onnx
    except ImportError:
        return "as built (onnx is not installed to look)", "as built"
    graph = onnx.load(str(directory / "model.onnx"), load_external_data=False).graph
    kinds = set()
    for node in graph.node:
        if node.op_type == "MatMulNBits":
            told = {one.name: one.i for one in node.attribute}
            zeros = "with zeros" if len(node.input) > 3 and node.input[3] else "without zeros"
            kinds.add(f"int{told['bits']} in groups of {told['block_size']}, {zeros}")
    names = {onnx.TensorProto.FLOAT: "f32", onnx.TensorProto.FLOAT16: "f16", onnx.TensorProto.BFLOAT16: "bf16"}
    held = names.get(graph.output[-1].type.tensor_type.elem_type, "?")
    return ", ".join(sorted(kinds)) or held, held
