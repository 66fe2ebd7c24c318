"""transformers on torch's CPU, in float32: plain, and with its own prompt lookup."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from adapters.quality import log_probabilities
from outrider_lab.peers.contract import Answer, EngineMissing, NotOffered, PeerOptions, PeerPrompt, Score, cut_at_stop
from outrider_lab.peers.convert import find_hf_directory

LOOKUP_TOKENS = 3  # as in the library's documentation of prompt lookup


def load(options: PeerOptions) -> Transformers:
    """Load the model in a mode: plain or lookup. Raises EngineMissing."""
    from adapters.torch_device.failures import quieten

    quieten()
    try:
        import torch
        import transformers
    except ImportError as error:
        raise EngineMissing(f"{error.name} is not installed: pip install 'outrider[torch]'") from error
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(find_hf_directory(options)), dtype=torch.float32)
    return Transformers(torch, transformers, model.eval(), options)


class Transformers:
    """`generate` of a model. The number of forwards is counted at the model: the library tells none."""

    def __init__(self, torch: Any, transformers: Any, model: Any, options: PeerOptions) -> None:
        """Take a loaded model."""
        self._torch, self._transformers, self._model = torch, transformers, model
        self._mode, self._at_once = options.mode, options.at_once
        self._forwards = 0
        model.register_forward_hook(self._count)

    def describe(self) -> dict[str, str]:
        """See PeerEngine."""
        kind = str(self._model.dtype).removeprefix("torch.")
        asked = {"asked": f"prompt_lookup_num_tokens {LOOKUP_TOKENS}"} if self._mode == "lookup" else {}
        return {
            "version": f"transformers {version('transformers')}, torch {version('torch')}",
            "weights": kind,
            "activations": kind,
            "kv_cache": kind,
            "threads": str(self._torch.get_num_threads()),
            "attention": str(self._model.config._attn_implementation),
        } | asked

    def generate(self, prompt: PeerPrompt, max_tokens: int) -> Answer:
        """See PeerEngine."""
        ids = self._torch.tensor([prompt.tokens])
        timer = _Timer()
        self._forwards = 0
        extra = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if self._mode == "lookup" else {}
        found = self._run(ids, self._torch.ones_like(ids), prompt.stop_tokens, max_tokens, streamer=timer, **extra)
        last_s = time.perf_counter() - timer.started_s
        tokens = [int(token) for token in found[0, ids.shape[1] :]][:max_tokens]
        told = self._mode == "lookup"
        return Answer(
            tokens,
            timer.first_s,
            last_s,
            self._forwards if told else None,
            None,
            len(tokens) - self._forwards if told else None,
        )

    def generate_many(self, prompts: Sequence[PeerPrompt], max_tokens: int) -> list[Answer]:
        """See PeerEngine: batches of `at_once`, padded to the longest prompt. Each ends with its longest answer."""
        if self._mode == "lookup":
            raise NotOffered("its assisted generation takes one request at a time")
        found: list[Answer] = []
        for start in range(0, len(prompts), self._at_once):
            before_s = found[-1].last_s if found else 0.0
            for one in self._generate_batch(prompts[start : start + self._at_once], max_tokens):
                found.append(Answer(one.tokens, before_s + one.first_s, before_s + one.last_s))
        return found

    def _generate_batch(self, prompts: Sequence[PeerPrompt], max_tokens: int) -> list[Answer]:
        longest = max(len(prompt.tokens) for prompt in prompts)
        pad = prompts[0].stop_tokens[0] if prompts[0].stop_tokens else 0
        missing = [longest - len(prompt.tokens) for prompt in prompts]
        ids = self._torch.tensor([[pad] * gap + prompt.tokens for gap, prompt in zip(missing, prompts, strict=True)])
        mask = self._torch.tensor([[0] * gap + [1] * (longest - gap) for gap in missing])
        timer = _Timer()
        found = self._run(ids, mask, prompts[0].stop_tokens, max_tokens)
        last_s = time.perf_counter() - timer.started_s
        return [
            Answer(cut_at_stop([int(token) for token in row[longest:]], prompt.stop_tokens), last_s, last_s)
            for row, prompt in zip(found, prompts, strict=True)
        ]

    def score(self, tokens: Sequence[int]) -> Score:
        """See PeerEngine."""
        with self._torch.no_grad():
            rows = self._model(self._torch.tensor([list(tokens[:-1])])).logits[0].float().numpy()
        return Score(log_probabilities(rows, tokens[1:]), [int(token) for token in rows.argmax(axis=1)])

    def forget(self) -> None:
        """See PeerEngine: nothing is remembered."""

    def close(self) -> None:
        """See PeerEngine."""

    def _run(self, ids: Any, mask: Any, stop_tokens: Sequence[int], max_tokens: int, **extra: Any) -> Any:
        config = self._transformers.GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=list(stop_tokens) or None,
            pad_token_id=stop_tokens[0] if stop_tokens else 0,
        )
        with self._torch.no_grad():
            return self._model.generate(ids, attention_mask=mask, generation_config=config, **extra)

    def _count(self, *_: Any) -> None:
        self._forwards += 1


class _Timer:
    """A streamer that notes when the first token comes; the prompt comes before it."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self.first_s = 0.0
        self._calls = 0

    def put(self, _value: Any) -> None:
        self._calls += 1
        if self._calls == 2:
            self.first_s = time.perf_counter() - self.started_s

    def end(self) -> None:
        """Nothing is held back."""
