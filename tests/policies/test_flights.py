"""In how many flights requests run: as many as gain, or lose nothing."""

from __future__ import annotations

from policies.serving.flights import FlightCosts, choose_flights, observe_flight, predict_flights_ms


def know(*stages: tuple[float, float], beside_ms: float = 0.0) -> FlightCosts:
    """What is known behind rounds on stages of so many ms and ms a row."""
    costs = FlightCosts()
    for rows in (1, 2, 4, 8) * 8:
        took_ms = [base + row * rows for base, row in stages]
        costs = observe_flight(
            costs, rows=rows, sequences=rows, stage_ms=took_ms, alone_ms=sum(took_ms) + beside_ms if rows > 1 else None
        )
    return costs


def choose(costs: FlightCosts, sequences: int, most: int = 3, now: int = 1) -> int:
    return choose_flights(costs, sequences=sequences, most=most, now=now)


def test_without_knowledge_there_are_as_many_as_there_can_be():
    assert [choose(FlightCosts(), count) for count in (0, 1, 2, 3, 9)] == [1, 1, 2, 3, 3]


def test_equal_stages_all_work_whatever_rows_cost():
    for row_ms in (0.0, 1.0):
        costs = know((10.0, row_ms), (10.0, row_ms), (10.0, row_ms))
        assert [choose(costs, count) for count in (1, 2, 3, 8)] == [1, 2, 3, 3]


def test_a_long_stage_is_not_made_to_run_more_forwards_than_it_has_time_for():
    costs = know((20.0, 0.0), (5.0, 0.0), (5.0, 0.0))
    assert choose(costs, 6) == 1
    assert predict_flights_ms(costs, 6, 3) > 1.9 * predict_flights_ms(costs, 6, 1)


def test_rows_that_cost_time_pay_for_more_forwards_also_with_a_long_stage():
    assert choose(know((2.0, 10.0), (1.0, 5.0), (1.0, 5.0)), 8) > 1


def test_what_a_round_takes_beside_its_stages_is_hidden_by_other_rounds():
    stages = ((10.0, 0.0), (6.0, 0.0))
    assert choose(know(*stages), 4, most=2) == 1
    assert choose(know(*stages, beside_ms=6.0), 4, most=2) == 2


def test_flights_stay_where_a_change_gains_little():
    costs = know((10.4, 0.0), (9.6, 0.0))
    assert (choose(costs, 4, most=2, now=1), choose(costs, 4, most=2, now=2)) == (1, 2)
