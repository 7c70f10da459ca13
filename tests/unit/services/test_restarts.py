"""Whoever keeps a cluster running starts again what ends, but not for ever what cannot run."""

from services.restarts import MAX_ENDS_AT_ONCE, WORTH_A_RESTART_S, Restarts

SHORT, LONG = WORTH_A_RESTART_S / 2, WORTH_A_RESTART_S * 2


def verdicts(restarts: Restarts, name: str, ran: list[float], now: float = 0.0) -> list[bool]:
    found = []
    for seconds in ran:
        now += seconds
        found.append(restarts.worth_another(name, now))
        restarts.started(name, now)
    return found


def test_a_process_that_cannot_run_is_given_up_at_its_third_end_in_a_row():
    assert MAX_ENDS_AT_ONCE == 3
    assert verdicts(Restarts(["r"], 0.0), "r", [SHORT, SHORT, SHORT]) == [True, True, False]


def test_one_that_has_run_for_a_while_begins_anew():
    """Two quick ends, then one that was none: what counts is in a row."""
    assert all(verdicts(Restarts(["r"], 0.0), "r", [SHORT, SHORT, LONG, SHORT, SHORT, LONG]))


def test_each_process_is_counted_by_itself():
    restarts = Restarts(["r", "d"], 0.0)
    assert verdicts(restarts, "r", [SHORT, SHORT]) == [True, True]
    assert restarts.worth_another("d", SHORT)
    assert not restarts.worth_another("r", 3 * SHORT)
