"""Sites that are refused again and again, that say what no log should hold, or that answer in
another's name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from perfed.core.errors import LONGEST_REASON, Refused, one_line
from perfed.flower.conduct import Conduct
from perfed.flower.membership import Answer, Unreadable, introduction
from perfed.flower.protocol import JOIN, ROUND, Envelope
from tests.flower.setting import Desk, desk, write_federation
from tests.flower.test_admission import Lying
from tests.flower.test_coordinator import lines, run
from tests.hostile import LIES

LIE, REASON = LIES["perfed-ckt"]["zeros"]
NASTY = {
    "line break": "well\nperfed: round 9: accuracy 99 %",
    "carriage return": "well\rperfed: all is well",
    "escape codes": "\x1b[2J\x1b]0;title\x07\x9b31m",
    "a megabyte": "x" * 10**6,
    "half a character": "\ud800\udfff",
    "turned around": "\u202egnihton\u2066\u200b\u2028",
    "null": "a\0b",
}


# Refused again and again.


def test_who_is_refused_three_times_in_a_row_rests_and_comes_back() -> None:
    conduct = Conduct(3, 5)
    assert conduct.note(0, [0, 2], {1: "no"}) == []
    assert conduct.note(1, [0, 1, 2], {}) == []  # in a row, that is
    for round in (2, 3):
        assert conduct.note(round, [0, 2], {1: "no"}) == []
    assert conduct.note(7, [0, 2], {1: "no"}) == [1]  # of the rounds in which it was asked
    assert list(conduct.aside(8)) == list(conduct.aside(12)) == [1]
    assert "until round 13: its answers were refused 3 times in a row" in conduct.aside(8)[1]
    assert conduct.aside(13) == {}
    assert conduct.note(13, [0], {1: "no"}) == [1]  # at once
    assert conduct.note(19, [0, 1], {}) == []
    assert conduct.note(20, [0], {1: "no"}) == []


@pytest.mark.attack(4, 6, 7, "refused-repeatedly")
def test_a_liar_is_set_aside_also_by_a_coordinator_that_was_started_again(tmp_path: Path) -> None:
    """It lies in round 0, joins again in round 1, lies in 2, rests in 3 and 4, and is honest after
    that."""
    options = {"set_aside_after": 2, "set_aside_rounds": 2}
    folder = write_federation(tmp_path / "federation", options=options, rounds=6)

    class Killed(Lying):
        """In round 4, before anybody hears of it."""

        def send(self, node: int, task: Envelope, seconds: float) -> str:
            if (task.header.kind, task.header.round) == (ROUND, 4):
                raise KeyboardInterrupt
            return super().send(node, task, seconds)

    said: list[str] = []
    first = Killed(folder, {11}, LIE)
    with pytest.raises(KeyboardInterrupt):
        run(folder, first, said)
    again = desk(folder)
    result = run(folder, again, said)
    by_round = {line["round"]: line for line in lines(result.path, "rounds.jsonl")}
    assert [1 in by_round[round]["clients"] for round in range(6)] == [False] * 5 + [True]
    assert REASON in by_round[2]["absent"]["1"]
    why = by_round[4]["absent"]["1"]
    assert "set aside until round 5: its answers were refused 2 times in a row" in why
    assert REASON in why
    assert by_round[3]["absent"]["1"] == why
    assert said.count(f"client 1 is {why}") == 1
    asked = [t.header.round for n, t in first.tasks + again.tasks if n == 11]
    assert [round for round in asked if round >= 0] == [0, 2, 5]
    assert not any(client in line["absent"] for line in by_round.values() for client in "02")


@pytest.mark.attack("refused-repeatedly")
def test_who_is_set_aside_is_asked_where_a_round_cannot_do_without(tmp_path: Path) -> None:
    options = {"set_aside_after": 1, "set_aside_rounds": 99, "minimum": 3, "deadline": 0.2}
    folder = write_federation(tmp_path / "federation", options=options, rounds=3)
    lies = iter(range(1))
    lying = Lying(folder, {11}, lambda a: a if next(lies, None) is None else LIE(a))
    result = run(folder, lying)
    assert [line["clients"] for line in lines(result.path, "rounds.jsonl")] == [[0, 1, 2]] * 4


@pytest.mark.attack("refused-repeatedly")
def test_nobody_is_set_aside_for_being_late_or_for_saying_that_it_cannot(tmp_path: Path) -> None:
    options = {"set_aside_after": 1, "deadline": 30}
    folder = write_federation(tmp_path / "federation", options=options, rounds=3)

    def fate(node: int, task: Envelope) -> str | None:
        return "out of memory" if (node, task.header.round) == (11, 0) else None

    class Declining(Desk):
        """Node 12 says in round 0 that it cannot."""

        def send(self, node: int, task: Envelope, seconds: float) -> str:
            name = super().send(node, task, seconds)
            if (node, task.header.round) == (12, 0):
                self._arrived[name] = task.refuse("failed with MemoryError")
            return name

    result = run(folder, Declining(desk(folder).sites, fate))
    by_round = {line["round"]: line for line in lines(result.path, "rounds.jsonl")}
    assert by_round[0]["absent"] == {"1": "out of memory", "2": "failed with MemoryError"}
    assert by_round[2]["clients"] == [0, 1, 2]


# What sites say.


@pytest.mark.attack(12)
@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY.keys())
def test_a_refusal_is_one_short_line_of_characters_that_can_be_seen(text: str) -> None:
    for shown in (one_line(text), str(Refused(f"it says {text}"))):
        assert shown.isprintable()
        assert len(shown) <= LONGEST_REASON + 2
        assert shown.encode()
    assert one_line("Zürich, 東京") == "Zürich, 東京"


@pytest.mark.attack(12)
@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY.keys())
@pytest.mark.parametrize("where", ["architecture", "site"])
def test_a_name_that_no_log_should_hold_is_refused(where: str, text: str) -> None:
    sizes = dict.fromkeys(("train", "validation", "test"), 9)
    facts = {"client": 1, "sizes": sizes, "architecture": "mlp", "site": "here"} | {where: text}
    with pytest.raises(Refused, match="is no short text") as refused:
        introduction(facts, 3)
    assert str(refused.value).isprintable()


class Saying(Desk):
    """What node 11 answers to some kind of task is made by ``says``."""

    def __init__(self, folder: Path, kind: str, says: Callable[[Envelope], Answer]) -> None:
        super().__init__(desk(folder).sites)
        self.kind, self.says = kind, says

    def send(self, node: int, task: Envelope, seconds: float) -> str:
        name = super().send(node, task, seconds)
        answer = self._arrived[name]
        if (node, task.header.kind) == (11, self.kind) and isinstance(answer, Envelope):
            self._arrived[name] = self.says(answer)
        return name


def with_header(answer: Envelope, **changes: Any) -> Envelope:
    return dataclasses.replace(answer, header=dataclasses.replace(answer.header, **changes))


@pytest.mark.attack(12)
@pytest.mark.parametrize(
    "says",
    [
        lambda answer, text: answer.refuse(text),
        lambda answer, text: text,  # Flower's own error
        lambda answer, text: Unreadable(text),
        lambda answer, text: with_header(answer, run=text),
        lambda answer, text: with_header(answer, kind=text),
        lambda answer, text: with_header(answer, public=text),
        lambda answer, text: with_header(answer, task=text),
    ],
    ids=["refusal", "error", "unreadable", "run", "kind", "public", "task"],
)
@pytest.mark.parametrize("kind", [JOIN, ROUND])
def test_what_a_site_says_is_one_line_on_the_console_and_in_the_logs(
    kind: str, says: Callable[[Envelope, str], Answer], tmp_path: Path
) -> None:
    options = {"start_with": 2, "deadline": 30}
    folder = write_federation(
        tmp_path / "federation", options=options, rounds=1, clients_per_round=2
    )
    said: list[str] = []
    through = Saying(folder, kind, lambda answer: says(answer, "".join(NASTY.values())))
    result = run(folder, through, said)
    spoken = [text for text in said if text != result.table()]
    assert all(text.isprintable() and len(text) < 2 * LONGEST_REASON for text in spoken)
    assert any("may not join" in text or "is left out" in text for text in spoken)
    for line in lines(result.path, "rounds.jsonl"):
        for why in (*line["absent"].values(), *line.get("refused", {}).values()):
            assert why.isprintable()
            assert len(why) < 2 * LONGEST_REASON


# In another's name.


@pytest.mark.attack(17)
def test_an_answer_without_the_secret_of_the_task_is_nobodys(tmp_path: Path) -> None:
    """Flower compares who sends an answer with a number in it that the sender writes itself. A
    site that guesses the id of another's message could answer it; it cannot know what is in it."""
    folder = write_federation(tmp_path / "federation", rounds=1)
    through = Saying(folder, ROUND, lambda answer: with_header(answer, task="0" * 32))
    result = run(folder, through)
    line = lines(result.path, "rounds.jsonl")[-1]
    assert line["clients"] == [0, 2]
    assert "does not know the task's secret" in line["refused"]["1"]
    secrets = [task.header.task for _, task in through.tasks]
    assert len(set(secrets)) == len(secrets)
    assert {len(secret) for secret in secrets} == {32}


@pytest.mark.attack(17)
def test_of_two_answers_to_one_task_the_first_counts(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "federation", rounds=2)

    class Twice(Desk):
        """Node 11's answers stay where they are, and are others when they are fetched again."""

        def receive(self, names: Iterable[str]) -> dict[str, Answer]:
            arrived = super().receive(names)
            for name, answer in arrived.items():
                node, task = self.tasks[int(name.removeprefix("message-"))]
                if (node, task.header.kind) == (11, ROUND) and isinstance(answer, Envelope):
                    again = answer.refuse("changed its mind")
                    self._arrived[name] = again
            return arrived

    twice = Twice(desk(folder).sites)
    result = run(folder, twice)
    once = write_federation(tmp_path / "once", rounds=2)
    run(once, desk(once))
    assert lines(result.path, "clients.jsonl") == lines(once / "run", "clients.jsonl")
    assert len(twice._arrived) == 2  # never fetched
