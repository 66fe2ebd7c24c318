"""Shared prefixes are computed once, prompts share a forward fairly, and neither changes a token."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.protocol.commands import Submit
from orchestrator.worker.engine.loop import DecodeLoop
from policies.sampling import Sampling
from tests.support.loops import decode, loop_over, suffix, toy

SYSTEM = [(7 * i) % 250 for i in range(100)]


def request(key: str, prompt: list[int], *, max_tokens: int = 30) -> Submit:
    return Submit(key, prompt, max_tokens, Sampling(0.7, seed=len(prompt)), stop_tokens=[256])


def alone(submit: Submit) -> list[int]:
    out, _ = decode(loop_over(toy(), None, running=1, prefix_reuse=False), [submit])
    return out[submit.request_id]


def decode_and_count_reused(loop: DecodeLoop, submits: list[Submit]) -> tuple[dict[str, list[int]], dict[str, int]]:
    out, rounds = decode(loop, submits)
    stats = {delta.request_id: delta.stats for done in rounds for delta in done.deltas if delta.finish}
    return out, {key: found.reused for key, found in stats.items() if found is not None}


def test_a_later_request_begins_with_what_an_earlier_one_computed():
    loop = loop_over(toy(), suffix())
    first, second = request("a", [*SYSTEM, 1, 2, 3]), request("b", [*SYSTEM, 9, 8])
    out, _ = decode_and_count_reused(loop, [first])
    again, counts = decode_and_count_reused(loop, [second])
    assert counts == {"b": 96}  # full blocks of 16
    assert out | again == {"a": alone(first), "b": alone(second)}
    gauges = loop.gauges(0)
    assert (gauges.prefix_queries, gauges.prefix_hits) == (205, 96)


def test_an_answer_is_reused_too_where_its_rows_are_of_the_prompts_class():
    for length, most in ((100, 128), (20, 16)):  # long prompts have one class, short ones two
        loop = loop_over(toy(), suffix())
        prompt = SYSTEM[:length]
        out, _ = decode_and_count_reused(loop, [request("a", prompt)])
        turn = request("b", [*prompt, *out["a"], 5])
        again, counts = decode_and_count_reused(loop, [turn])
        assert counts["b"] == most
        assert again["b"] == alone(turn)


def test_equal_prompts_at_once_are_computed_once():
    loop = loop_over(toy(rows=64), suffix())
    submits = [request(str(index), [*SYSTEM, 7, 7]) for index in range(5)]
    out, counts = decode_and_count_reused(loop, submits)
    assert sorted(counts.values()) == [0, 96, 96, 96, 96]
    assert set(map(tuple, out.values())) == {tuple(alone(submits[0]))}


def test_reuse_can_be_switched_off():
    loop = loop_over(toy(), suffix(), prefix_reuse=False)
    for key in "ab":
        _, counts = decode_and_count_reused(loop, [request(key, SYSTEM)])
        assert counts[key] == 0
    assert loop.gauges(0).prefix_hits == 0


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=10),
    st.integers(16, 40),
    st.integers(1, 6),
)
@settings(max_examples=30)
def test_no_mixture_of_prefixes_preemption_and_eviction_changes_a_token(shapes, blocks, running):
    submits = [
        request(str(index), [*SYSTEM[:shared], kind, kind], max_tokens=count)
        for index, (shared, kind, count) in enumerate(shapes)
    ]
    model = toy(kv_blocks=blocks, rows=48)
    loop = loop_over(model, suffix(), running=running)
    out, _ = decode(loop, submits)
    assert out == {submit.request_id: alone(submit) for submit in submits}
    again, _ = decode(loop, submits)
    assert again == out
    assert model.free_blocks() == model.capabilities.total_blocks


def test_short_prompts_overtake_a_long_one_and_the_long_one_gets_on():
    loop = loop_over(toy(rows=64), None, running=8)
    long = request("long", [(3 * i) % 241 for i in range(1500)], max_tokens=2)
    loop.submit(long)
    for index in range(6):
        loop.submit(request(f"s{index}", [index + 1, *range(20)], max_tokens=2))
    order: list[str] = []
    rounds = 0
    while not loop.idle:
        rounds += 1
        order += [delta.request_id for delta in loop.run_round().deltas if delta.finish]
    assert order[-1] == "long"
    assert rounds < 1500 / 16 + 20  # beside decoding it gets 16 rows a round at least


def test_a_prefill_beside_decoding_keeps_to_the_bound_it_has_measured():
    loop = loop_over(toy(script="base_ms=1&row_ms=0.2", rows=512), None, max_itl_ms=20.0)
    loop.submit(request("runs", [4, 5, 6], max_tokens=200))
    for _ in range(3):
        loop.run_round()
    loop.submit(request("comes", [(3 * i) % 241 for i in range(900)], max_tokens=2))
    together = []
    while True:
        done = loop.run_round()
        if any(delta.request_id == "comes" for delta in done.deltas):
            break
        together.append(done)
    assert len(together) > 5
    assert max(done.device_ms for done in together) <= 20.0
    assert sum(done.device_ms for done in together[1:-1]) / len(together[1:-1]) > 9.0  # and the room is used
