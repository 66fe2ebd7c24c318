"""What a round is planned with is true of the pool that it runs on."""

from hypothesis import given
from hypothesis import strategies as st

from adapters.contract import BlockRules, Segment
from adapters.kv_blocks import BlockPool
from orchestrator.engine.batch import ScheduledSequence, most_blocks
from orchestrator.engine.sequence import SequenceState
from orchestrator.workers.messages import Submit


@given(
    st.sampled_from([1, 2, 3, 16, 32]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 2]),
    st.lists(st.tuples(st.integers(0, 70), st.integers(1, 70), st.integers(0, 70)), min_size=1, max_size=4),
)
def test_parts_never_need_more_blocks_than_is_said(block_tokens, pad_to, even_behind, sequences):
    pool = BlockPool(BlockRules(1000, block_tokens, len(sequences), pad_to=pad_to, even_behind=even_behind))
    parts, batch = [], []
    for slot, (held, known, rolled_back) in enumerate(sequences):
        if held:
            pool.reserve([Segment(slot, 0, [5] * held, (0, 1))])
        parts.append(
            ScheduledSequence(
                SequenceState(Submit(str(slot), [5], 1), [5], frozenset(), 0.0, slot=slot), known, emits_logits=True
            )
        )
        batch.append(Segment(slot, max(0, held - rolled_back), [5] * known, (0, 1)))
    assert pool.count_needed_blocks(batch) <= most_blocks(parts, paid_rows=pad_to, block_tokens=block_tokens)
