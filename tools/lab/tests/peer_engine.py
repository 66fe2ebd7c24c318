"""An engine for comparisons whose answers are known, and which can be made to fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from outrider_lab.peers.contract import Answer, EngineMissing, NotOffered, PeerPrompt, Score


@dataclass(frozen=True)
class Script:
    """`fate`: "" for none, "missing" at load, "raises" or "dies" at the `at`-th answer alone. `forgetful`: an answer
    tells how many came before it since `forget`."""

    fate: str = ""
    at: int = 1
    batches: bool = True
    forgetful: bool = False


class ScriptedEngine:
    def __init__(self, script: Script) -> None:
        self.script, self.asked, self.since = script, 0, 0

    def describe(self) -> dict[str, str]:
        return {"version": "scripted", "weights": "none"}

    def generate(self, prompt: PeerPrompt, max_tokens: int) -> Answer:
        self.asked, self.since = self.asked + 1, self.since + 1
        if self.script.fate and self.asked >= self.script.at:
            if self.script.fate == "raises":
                raise RuntimeError("a tensor fell over")
            os.write(2, b"the last words")
            os.kill(os.getpid(), signal.SIGKILL)
        first = self.since if self.script.forgetful else prompt.tokens[0]
        return Answer([first] * max_tokens, 0.1, 0.1 + 0.01 * max_tokens)

    def generate_many(self, prompts: Sequence[PeerPrompt], max_tokens: int) -> list[Answer]:
        if not self.script.batches:
            raise NotOffered("one at a time")
        return [Answer([one.tokens[0]] * max_tokens, 0.2, 0.4) for one in prompts]

    def score(self, tokens: Sequence[int]) -> Score:
        return Score([-1.0] * (len(tokens) - 1), [*tokens[1:]])

    def forget(self) -> None:
        self.since = 0

    def close(self) -> None:
        pass


def load(script: Script) -> ScriptedEngine:
    if script.fate == "missing":
        raise EngineMissing("not here: pip install scripted")
    return ScriptedEngine(script)
