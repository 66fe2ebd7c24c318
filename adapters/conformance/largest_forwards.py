"""The forwards in which a loaded model holds all that was announced for it."""

from __future__ import annotations

from collections.abc import Sequence

from adapters.contract import LoadedModel, Segment
from device_profiles.memory import ANNOUNCED_WIDTHS

# Token ids are taken from a thousand that every vocabulary has.
_FIRST_TOKEN, _TOKENS = 5, 1000
# Full batches: buffers that a runtime makes for a shape are there from its second forward on.
_FULL_BATCHES = 2


def run_largest_forwards(model: LoadedModel, logits_rows: int) -> list[int]:
    """Fill the KV pool by the longest prompts in the longest chunks, of each of which `logits_rows` rows have their
    logits, and then run batches of all slots. Before that a forward of each small number of rows is run. Return all
    numbers of rows. Raises what the adapter does."""
    caps = model.capabilities
    rows, most = caps.max_batch_rows, min(logits_rows, caps.max_batch_rows)
    tokens = [_FIRST_TOKEN + index % _TOKENS for index in range(caps.max_context_tokens)]
    widths = list(range(2, min(ANNOUNCED_WIDTHS, rows)))
    for width in widths:
        model.forward([Segment(0, 0, tokens[:width], (0, 1))])
    last = min(caps.max_context_tokens, caps.total_blocks * caps.block_tokens) - rows
    for slot in range(caps.slots):
        for start in range(0, last + 1, rows):
            segment = Segment(slot, start, tokens[start : start + rows], (rows - most, rows))
            if model.count_needed_blocks([segment]) <= model.free_blocks():
                model.forward([segment])
    for slot in range(caps.slots):
        model.release(slot)
    share = rows // caps.slots
    while share > 1 and model.count_needed_blocks(_list_batch(caps.slots, tokens, share, 0)) > model.free_blocks():
        share //= 2  # a small pool has not room for as many rows of every slot
    batch = _list_batch(caps.slots, tokens, share, min(share, most // caps.slots))
    for _ in range(_FULL_BATCHES):
        model.forward(batch)
    if caps.apart_tokens:  # and rows behind the prompts, which may be another runtime's
        model.forward([Segment(slot, share, [_FIRST_TOKEN], (0, 1), apart=True) for slot in range(caps.slots)])
    return [*widths, rows, caps.slots * share]


def _list_batch(slots: int, tokens: Sequence[int], rows: int, wanted: int) -> list[Segment]:
    return [Segment(slot, 0, list(tokens[:rows]), (rows - wanted, rows)) for slot in range(slots)]
