"""What a round is planned with is true of the pool that it runs on."""

from hypothesis import given
from hypothesis import strategies as st

from adapters.contract import BlockRules, Segment
from adapters.kv_blocks import BlockPool
from orchestrator.protocol.commands import Submit
from orchestrator.worker.engine.batch import ScheduledSequence, count_logits_rows, most_blocks, schedule_rows
from orchestrator.worker.engine.sequence import LogprobCollector, SequenceState
from policies.serving.prefill_shares import PrefillRows


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
    assert pool.count_needed_blocks(batch) <= most_blocks(parts, min_rows=pad_to, block_tokens=block_tokens)


prompts = st.lists(st.tuples(st.integers(1, 400), st.booleans()), min_size=1, max_size=12)


@given(prompts, st.integers(16, 1024), st.integers(1, 2))
def test_no_forward_has_more_logits_than_memory_was_planned_for(prompts, max_rows, min_rows):
    running = []
    for number, (length, scored) in enumerate(prompts):
        submit = Submit(str(number), [5 + number] * length, 4, logprobs=0 if scored else None, prompt_logprobs=scored)
        scores = LogprobCollector.of(submit)
        running.append(SequenceState(submit, list(submit.prompt), frozenset(), 0.0, slot=number, scores=scores))
    left = {sequence.submit.request_id for sequence in running}
    for _ in range(2000):
        every = PrefillRows(max_rows, max_rows)
        parts = schedule_rows(running, max_rows=max_rows, prefill_rows=every, min_rows=min_rows)
        wanted = sum(last - first for first, last in (part.wanted for part in parts))
        assert wanted <= count_logits_rows(max_rows, len(running), 0)
        assert parts, "somebody gets on"
        for part in parts:
            part.sequence.cached += part.num_query_tokens
            if part.emits_logits:
                running.remove(part.sequence)
                left.discard(part.sequence.submit.request_id)
        if not running:
            break
    assert not left, "each prompt is read to its end"
