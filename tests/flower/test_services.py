"""What is kept running: when it is started again."""

from __future__ import annotations

from perfed.flower.services import FIRST_WAIT, FORGETS, LONGEST_WAIT, WELL, _Kept


def waits(kept: _Kept, until: float, lives: float, begins: float = 1000.0) -> list[float]:
    """It ends ``lives`` seconds after each start, for so many seconds."""
    found, now = [], begins
    while now < begins + until:
        kept.began, now = now, now + lives
        kept.lengthen_wait(now)
        found.append(kept.wait)
        now += kept.wait
    return found


def test_a_site_that_is_refused_tries_often_while_flower_may_still_forget_it() -> None:
    kept = _Kept("site-0", lambda: 0)
    assert set(waits(kept, FORGETS - 5, lives=1)) == {FIRST_WAIT}
    later = waits(kept, 3600, lives=1, begins=1001 + FORGETS)
    assert later[:6] == [4, 8, 16, 32, 60, 60]
    assert set(later[6:]) == {LONGEST_WAIT}


def test_what_has_run_well_begins_anew() -> None:
    kept = _Kept("site-0", lambda: 0)
    waits(kept, 3600, lives=1)
    assert kept.wait == LONGEST_WAIT
    assert waits(kept, 1, lives=WELL + 1) == [FIRST_WAIT]
