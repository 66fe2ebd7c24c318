"""Training: the draft learns the target's likeliest tokens and their chances; stops and goes on at any step.

The loss of a position is the cross entropy between the target's distribution and the draft's. Both are reduced to the
target's likeliest tokens that the draft can say and one class for all other tokens (KL up to a constant). The target's
is sharpened towards its first choice, because that is what greedy decoding accepts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from orchestrator.generating.data import DataError, Text
from outrider_lab.distill.draft import Draft, Shape
from outrider_lab.distill.lines import NOTHING, Rows, indexes_of, rows_of

CHECKPOINT = "checkpoint.pt"
_SHARPEN = 0.5  # of the target's chances, this part is moved to its first choice
_LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train. `steps` is the whole, over all runs; `batch_tokens` make a step. Tables learn at `table_rate` times
    the rate of the layers; with little data 0 is best, and the embedding stays as it began."""

    steps: int
    batch_tokens: int = 8192
    row_tokens: int = 1024
    learning_rate: float = 3e-3
    warm_up: int = 50
    table_rate: float = 0.2
    weight_decay: float = 0.05
    dropout: float = 0.1
    seed: int = 0


@dataclass(slots=True)
class State:
    """All that a run goes on from."""

    draft: Draft
    optimizer: torch.optim.Optimizer
    outputs: NDArray[np.int64]
    plan: Plan
    step: int = 0

    @classmethod
    def fresh(cls, shape: Shape, outputs: NDArray[np.int64], plan: Plan) -> State:
        torch.manual_seed(plan.seed)
        draft = Draft(shape, plan.dropout)
        return cls(draft, _optimizer(draft, plan), outputs, plan)

    def save(self, directory: Path) -> None:
        """Write the checkpoint, whole or not at all."""
        directory.mkdir(parents=True, exist_ok=True)
        written = directory / f"{CHECKPOINT}.part"
        torch.save(
            {
                "shape": self.draft.shape.values(),
                "plan": asdict(self.plan),
                "outputs": torch.from_numpy(self.outputs),
                "step": self.step,
                "draft": self.draft.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            },
            written,
        )
        written.replace(directory / CHECKPOINT)

    @classmethod
    def load(cls, directory: Path) -> State:
        """Read what `save` wrote. Raises DataError."""
        try:
            found: dict[str, Any] = torch.load(directory / CHECKPOINT, weights_only=True)
            plan = Plan(**found["plan"])
            draft = Draft(Shape(**found["shape"]), plan.dropout)
            draft.load_state_dict(found["draft"])
            optimizer = _optimizer(draft, plan)
            optimizer.load_state_dict(found["optimizer"])
        except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(f"{directory / CHECKPOINT}: no checkpoint to go on from ({reason})") from error
        return cls(draft, optimizer, found["outputs"].numpy(), plan, found["step"])


def _optimizer(draft: Draft, plan: Plan) -> torch.optim.Optimizer:
    """AdamW. Tables learn more slowly: most of their rows are seen a few times only."""
    tables = [draft.model.embed_tokens.weight, draft.lm_head.weight]
    draft.model.embed_tokens.weight.requires_grad_(plan.table_rate > 0.0)
    known = {id(weight) for weight in tables}
    others = [weight for weight in draft.parameters() if id(weight) not in known]
    if plan.table_rate == 0.0:
        tables = tables[1:]  # the output layer is small enough to learn from little
    groups = [
        {"params": others, "scale": 1.0, "weight_decay": plan.weight_decay},
        {"params": tables, "scale": plan.table_rate or 1.0, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.98))


def begin_with(draft: Draft, embedding: NDArray[np.float32], outputs: NDArray[np.int64]) -> None:
    """Start from the target's own embedding, shape (vocabulary, its hidden size), on its principal axes.

    Tokens that mean alike to the target then mean alike to the draft from the first step, also those that the data
    hardly shows. The output layer starts from the same rows.
    """
    values, axes = np.linalg.eigh((embedding.T @ embedding).astype(np.float64))
    hidden = draft.shape.hidden
    best = axes[:, np.argsort(-values)[:hidden]].astype(np.float32)
    reduced = embedding @ best
    if best.shape[1] < hidden:  # a target that is narrower than its draft
        reduced = np.pad(reduced, ((0, 0), (0, hidden - best.shape[1])))
    reduced /= max(float(reduced.std()), _LEAST)
    with torch.no_grad():
        draft.model.embed_tokens.weight.copy_(torch.from_numpy(reduced * np.float32(0.5)))
        draft.lm_head.weight.copy_(torch.from_numpy(reduced[outputs] * np.float32(0.3 / math.sqrt(hidden))))


def loss_of(draft: Draft, batch: Rows) -> torch.Tensor:
    labelled = (torch.from_numpy(batch.chances) > 0).any(dim=-1)
    hidden = draft.compute_hidden(torch.from_numpy(batch.tokens.astype(np.int64)))[labelled]
    ids = torch.from_numpy(batch.top_ids.astype(np.int64))[labelled]
    return compute_loss(draft.lm_head(hidden).float(), ids, torch.from_numpy(batch.chances)[labelled].float())


def compute_loss(logits: torch.Tensor, ids: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of positions: logits (N, outputs), the target's likeliest `ids`, (N, K), with NOTHING for
    those that cannot be said, and their chances, (N, K)."""
    first = torch.zeros_like(chances)
    first[:, 0] = 1.0
    wanted = (1.0 - _SHARPEN) * chances + _SHARPEN * first
    known = ids != NOTHING
    wanted = torch.where(known, wanted, 0.0)
    logs = functional.log_softmax(logits, dim=-1).gather(1, ids.clamp(min=0))
    mass = torch.where(known, logs.exp(), 0.0).sum(dim=-1)
    others = (1.0 - mass).clamp(min=_LEAST).log()
    left = (1.0 - wanted.sum(dim=-1)).clamp(min=0.0)
    said = torch.where(known, wanted * logs, 0.0).sum(dim=-1)
    # Where not even the first choice can be said there is nothing to learn but to be unsure.
    return -(said + torch.where(known[:, 0], left * others, 0.1 * left * others)).mean()


def agreement(draft: Draft, texts: list[Text], outputs: NDArray[np.int64], row_tokens: int) -> float:
    """Return the share of labelled positions at which the draft's first choice is the target's. Greedy decoding would
    accept so many of one token drafted at each place of the target's own text."""
    indexes = indexes_of(outputs, draft.shape.vocabulary_size)
    rows = rows_of(texts, indexes, row_tokens, np.arange(len(texts)))
    right = asked = 0
    draft.eval()
    for row in range(len(rows.tokens)):
        labelled = torch.from_numpy((rows.chances[row] > 0).any(axis=-1))
        with torch.no_grad():
            hidden = draft.compute_hidden(torch.from_numpy(rows.tokens[row : row + 1].astype(np.int64)))[0][labelled]
            choice = draft.lm_head(hidden).argmax(dim=-1)
        right += int((choice == torch.from_numpy(rows.top_ids[row, :, 0].astype(np.int64))[labelled]).sum())
        asked += int(labelled.sum())
    draft.train()
    return right / max(1, asked)


def run(
    state: State,
    texts: list[Text],
    *,
    seconds: float,
    tell: Callable[[int, float], None],
    stopped: Callable[[], bool],
) -> None:
    """Train until the plan's last step, the time is over (`seconds`, 0 is no bound) or `stopped`; `tell` hears of each
    step and its loss. Every run of the same state goes through the same batches."""
    plan, draft = state.plan, state.draft
    ends = time.monotonic() + seconds if seconds else math.inf
    per_step = max(1, plan.batch_tokens // plan.row_tokens)
    indexes = indexes_of(state.outputs, draft.shape.vocabulary_size)
    steps_per_epoch = max(1, sum(len(text.tokens) for text in texts) // plan.row_tokens // per_step)
    rows, made_for = None, -1
    draft.train()
    while state.step < plan.steps and time.monotonic() < ends and not stopped():
        epoch, place = divmod(state.step, steps_per_epoch)
        if rows is None or epoch != made_for:
            order = np.random.default_rng((plan.seed, epoch)).permutation(len(texts))
            rows, made_for = rows_of(texts, indexes, plan.row_tokens, order), epoch
        chosen = np.arange(place * per_step, (place + 1) * per_step) % len(rows.tokens)
        batch = Rows(rows.tokens[chosen], rows.top_ids[chosen], rows.chances[chosen])
        tell(state.step + 1, _step(state, batch))
        state.step += 1


def _step(state: State, batch: Rows) -> float:
    plan = state.plan
    # Up within `warm_up` steps, then down along a cosine to a twentieth.
    progress = state.step / max(1, plan.steps)
    rate = plan.learning_rate * min(1.0, (state.step + 1) / plan.warm_up)
    rate *= 0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * progress))
    for group in state.optimizer.param_groups:
        group["lr"] = rate * group["scale"]
    state.optimizer.zero_grad(set_to_none=True)
    loss = loss_of(state.draft, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(state.draft.parameters(), 1.0)
    state.optimizer.step()
    return float(loss.detach())
