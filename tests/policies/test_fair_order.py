"""Fair order: equal work for those that keep asking, nobody starves, and an owner's own requests keep their order."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from policies.serving.fair_order import FairAccounts, WaitingRequest, hold_back, order_fairly

REQUESTS = st.lists(
    st.builds(WaitingRequest, st.sampled_from(["a", "b", "c", ""]), st.floats(1.0, 5000.0)), max_size=40
)


def serve(waiting: list[WaitingRequest], accounts: FairAccounts) -> tuple[list[WaitingRequest], FairAccounts]:
    """Give places one by one until nobody waits."""
    served, left = [], list(waiting)
    while left:
        first = left.pop(order_fairly(left, accounts)[0])
        accounts = accounts.charge(first)
        served.append(first)
    return served, accounts


@given(REQUESTS)
def test_everybody_comes_once_and_an_owners_requests_in_their_order(waiting):
    order = order_fairly(waiting, FairAccounts())
    assert sorted(order) == list(range(len(waiting)))
    for owner in "abc":
        own = [index for index in order if waiting[index].owner == owner]
        assert own == sorted(own)


@given(REQUESTS)
def test_the_order_that_was_announced_is_the_one_in_which_places_are_given(waiting):
    announced = [waiting[index] for index in order_fairly(waiting, FairAccounts())]
    assert serve(waiting, FairAccounts())[0] == announced


@given(REQUESTS)
def test_while_two_owners_wait_none_gets_ahead_by_more_than_a_request_of_each(waiting):
    largest = max((request.work for request in waiting), default=0.0)
    given_work: dict[str, float] = dict.fromkeys(("a", "b", "c", ""), 0.0)
    left = Counter(request.owner for request in waiting)
    for request in serve(waiting, FairAccounts())[0]:
        given_work[request.owner] += request.work
        left[request.owner] -= 1
        still = [owner for owner, count in left.items() if count]
        for name in still:
            for other in still:
                assert given_work[name] - given_work[other] <= 2.0 * largest


@given(REQUESTS, st.floats(1.0, 5000.0))
def test_a_newcomer_waits_for_no_more_than_one_request_of_each_owner(waiting, work):
    _, accounts = serve(waiting, FairAccounts())
    again = [*waiting, WaitingRequest("new", work)]
    place = order_fairly(again, accounts).index(len(again) - 1)
    assert all(count <= 1 for count in Counter(again[i].owner for i in order_fairly(again, accounts)[:place]).values())


@given(REQUESTS, REQUESTS)
def test_accounts_never_go_back_and_do_not_grow_for_ever(first, second):
    _, accounts = serve(first, FairAccounts())
    _, later = serve(second, accounts)
    assert later.now >= accounts.now
    assert all(until > later.now for until in later.ahead.values())


def test_one_request_for_eight_places_is_sent_ahead():
    assert [hold_back(sent, 16) for sent in (0, 16, 17, 18)] == [False, False, False, True]
    assert [hold_back(sent, 1) for sent in (0, 1, 2)] == [False, False, True]
    assert not hold_back(5, 0)
