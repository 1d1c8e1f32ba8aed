"""Hints of conversations reach the evictors of host memory and of tiers, after the objects that they store."""

from tests.core_driver import Driver, prefix_of

from kvtier.layout import History
from kvtier.policy.base import Held
from kvtier.policy.lru import Lru
from kvtier.types import Direction, NextTurn, Tell

A, B = "a", "b"


class Listening(Lru):
    """Records uses with their conversation, and hints."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple] = []

    def added(self, held: Held) -> None:
        self.heard.append(("added", held.name.decode(), held.conversation))
        super().added(held)

    def touched(self, held: Held) -> None:
        self.heard.append(("touched", held.name.decode(), held.conversation))
        super().touched(held)

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


def test_an_evictor_that_takes_no_hints_is_left_alone():
    core = Driver()
    core.expects("a", NextTurn.NOBODY)
    assert core.tells == [Tell("disk", "a", NextTurn.NOBODY)]


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


def test_a_store_that_fails_or_is_given_up_holds_no_news_back():
    for end in (lambda core: core.release("r"), lambda core: core.wait(2.0)):
        core, (evictor,) = listening(slots=2, store_deadline_s=1.0)
        core.store("r", prefix_of("abcd"), conversation=A)  # more than fits
        core.expects("a", NextTurn.USER)
        assert not core.tells
        end(core)
        core.run()
        core.wait(0.0)
        assert evictor.heard[-1] == ("a", NextTurn.USER)


def test_a_use_belongs_to_the_session_that_uses_the_object():
    core, (evictor,) = listening(tiers=())
    core.store("r1", prefix_of("x"), conversation=A)
    core.run()
    core.store("r2", prefix_of("x"), conversation=B)
    core.lookup("r3", prefix_of("x"))
    core.load("r3", prefix_of("x"))
    core.run()
    core.load("r4", prefix_of("x"), conversation=A)
    core.run()
    assert evictor.heard == [
        ("added", "x", "a"),
        *(("touched", "x", conversation) for conversation in ("b", None, "a")),
    ]


def test_a_promoted_object_belongs_to_the_loading_session():
    core, (evictor,) = listening()
    core.fill("disk", prefix_of("xy"))
    core.lookup("r", prefix_of("xy"))
    core.run()
    core.load("r", prefix_of("xy"), conversation=B)
    core.run()
    assert {it[2] for it in evictor.heard} == {"b"}
