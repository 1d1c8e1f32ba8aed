"""Hints of conversations reach the evictors of host memory and of tiers, after the objects that they store."""

from tests.core_driver import Driver, prefix_of

from kvtier.layout import History
from kvtier.policy.base import Use
from kvtier.policy.lru import Lru
from kvtier.types import Direction, NextTurn, Tell

A, B = "a", "b"


class Listening(Lru):
    """Records uses with their conversation, and hints."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple] = []

    def added(self, use: Use) -> None:
        self.heard.append(("added", use.name.decode(), use.conversation))
        super().added(use)

    def touched(self, use: Use) -> None:
        self.heard.append(("touched", use.name.decode(), use.conversation))
        super().touched(use)

    def expects(self, conversation, next_turn) -> None:
        self.heard.append((conversation, next_turn))


def listening(**options) -> tuple[Driver, list[Listening]]:
    made: list[Listening] = []

    def make() -> Listening:
        made.append(Listening())
        return made[-1]

    return Driver(evictor=make, **options), made


def test_every_group_of_host_memory_and_every_tier_gets_the_hint():
    core, evictors = listening(groups=(History(), History()), tiers=("disk", "far"))
    core.expects("a", NextTurn.USER)
    core.expects("a", None)
    assert core.tells == [Tell(tier, "a", hint) for hint in (NextTurn.USER, None) for tier in ("disk", "far")]
    assert [it.heard for it in evictors] == [[("a", NextTurn.USER), ("a", None)]] * 2


def test_a_hint_follows_the_open_stores_of_its_session():
    core, (evictor,) = listening()
    core.store("r", prefix_of("xy"), conversation=A)
    core.expects("a", NextTurn.TOOL)
    core.expects("b", NextTurn.USER)  # which stores nothing
    core.expects("a", NextTurn.NOBODY)  # the last hint counts
    assert core.tells == [Tell("disk", "b", NextTurn.USER)]
    core.run(directions=[Direction.GATHER])
    assert evictor.heard == [
        *(("b", NextTurn.USER), ("added", "x", "a"), ("added", "xy", "a")),
        ("a", NextTurn.NOBODY),
    ]
    assert core.tells[1:] == [Tell("disk", "a", NextTurn.NOBODY)]


def test_a_use_belongs_to_the_session_that_uses_the_object():
    core, (evictor,) = listening(tiers=())
    core.store_and_run("r1", prefix_of("x"), conversation=A)
    core.store("r2", prefix_of("x"), conversation=B)
    core.lookup("r3", prefix_of("x"))
    core.load_and_run("r3", prefix_of("x"))
    core.load_and_run("r4", prefix_of("x"), conversation=A)
    assert evictor.heard == [
        ("added", "x", "a"),
        *(("touched", "x", conversation) for conversation in ("b", None, "a")),
    ]


def test_a_promoted_object_belongs_to_the_loading_session():
    core, (evictor,) = listening()
    core.fill("disk", prefix_of("xy"))
    core.lookup_and_run("r", prefix_of("xy"))
    core.load_and_run("r", prefix_of("xy"), conversation=B)
    assert {it[2] for it in evictor.heard} == {"b"}
