"""Who waits for vLLM finds its blocks, as far as there is room for them: those that nobody waits for go first."""

from collections.abc import Callable, Iterator

import pytest
from tests.vllm_engine import SmallEngine

from kvtier.connect.vllm.line import Line

TOKENS, BLOCK, USERS, ROOM = 640, 32, 8, 5
"""Of each prompt, of a block; how many there are, and for how many there is room."""


@pytest.fixture
def start() -> Iterator[Callable[..., SmallEngine]]:
    engines: list[SmallEngine] = []

    def begin(**options) -> SmallEngine:
        engines.append(SmallEngine(blocks=1 + ROOM * (TOKENS // BLOCK + 1), **options))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


def prompts(engine: SmallEngine, count: int = USERS) -> list[list[int]]:
    return [[engine.draw.randrange(1000) for _ in range(TOKENS)] for _ in range(count)]


def found(engine: SmallEngine, asked: list[list[int]]) -> list[int]:
    """Tokens that each of `asked`, which wait all at once, finds in vLLM's own cache."""
    before: dict[str, int] = {}
    matched = engine.scheduler.matched

    def look(request, resident_tokens):
        before[request.request_id] = resident_tokens
        return matched(request, resident_tokens)

    engine.scheduler.matched = look
    requests = [engine.add(prompt, 1) for prompt in asked]
    engine.run()
    engine.scheduler.matched = matched
    return [before[request.request_id] for request in requests]


def in_turn(engine: SmallEngine) -> list[int]:
    """What users find who come back all at once, in the order in which they came first."""
    asked = prompts(engine)
    for prompt in asked:
        engine.add(prompt, 1)
        engine.run()
        engine.settle()
        engine.idle()
    return found(engine, asked)


def test_who_comes_back_in_turn_finds_what_there_was_room_for(start):
    tokens = in_turn(start())
    # The last five were there; of these the last one made room for the three that had to be computed or loaded anew.
    assert sum(tokens) >= 2 * TOKENS, tokens
    assert tokens[USERS - ROOM] >= TOKENS - BLOCK


def test_the_control_the_order_of_last_use(start, monkeypatch):
    monkeypatch.setattr(Line, "make_room", lambda *_given: None)
    assert sum(in_turn(start())) < TOKENS


def test_blocks_that_nobody_waits_for_go_first(start):
    engine = start()
    first, *others, new = prompts(engine, ROOM + 1)
    for prompt in (first, *others):
        engine.add(prompt, 1)
        engine.run()
    # The oldest are those of the first one, who is back and waits behind a new one.
    assert found(engine, [new, first])[1] >= TOKENS - BLOCK


def test_the_control_the_oldest_go_first(start, monkeypatch):
    monkeypatch.setattr(Line, "make_room", lambda *_given: None)
    test = test_blocks_that_nobody_waits_for_go_first
    with pytest.raises(AssertionError):
        test(start)


def test_what_two_share_goes_last(start):
    engine = start()
    common, *others = prompts(engine, ROOM)
    for prompt in (common, *others):
        engine.add(prompt, 1)
        engine.run()
    tails = [[engine.draw.randrange(1000) for _ in range(BLOCK)] for _ in range(2)]
    asked = [prompts(engine, 1)[0], [*common, *tails[0]], *others, [*common, *tails[1]]]
    tokens = found(engine, asked)
    assert tokens[1] == TOKENS  # although the last one in the line wants it, too


def test_a_line_that_has_gone_leaves_nothing_behind(start):
    engine = start()
    in_turn(engine)
    gone = [engine.add(prompt, 40) for prompt in prompts(engine)]
    for _ in range(3):
        engine.step()
    for request in gone:
        engine.abort(request)
    engine.run()
    line = engine.scheduler._line
    assert not line._waiting
    assert not line._held
    assert not line._wanted
