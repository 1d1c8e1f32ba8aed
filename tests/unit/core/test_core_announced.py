"""Announced chunks: a request waits for what another engine is storing, for a bounded time, and loads what has come."""

import itertools

import pytest
from tests.core_driver import CHUNK, Driver, prefix_of
from tests.unit.core.test_core_hierarchy import long_prefix, near_and_far, rules, tell

from kvtier.core.tier_searches import ASK_AGAIN_S_MAX, ASK_AGAIN_S_MIN, ASKING_MAX, ROUND_NAMES, STALL_S
from kvtier.layout import History, Window
from kvtier.types import Direction, Lookup, Prefix, Presence

TEXT = prefix_of("abcd")
EVERYTHING = 4 * CHUNK


def one_far(**values: object) -> Driver:
    of_core = {name: values.pop(name) for name in ("groups", "announced_wait_s") if name in values}
    return Driver(tiers=(rules("far", is_remote=True, **values),), slots=600, **of_core)


def ask(core: Driver, prefix: Prefix = TEXT, tokens: int = EVERYTHING, request: str = "r", **given: float) -> Lookup:
    """A lookup whose probes are answered at once."""
    answer = core.lookup(request, prefix, announced_tokens=tokens, **given)
    while core.probes:
        tell(core)
        answer = core.lookup(request, prefix, announced_tokens=tokens, **given)
    return answer


def wait(core: Driver, seconds: float = ASK_AGAIN_S_MAX) -> None:
    core.wait(seconds)


def written(core: Driver, chunks: int, prefix: Prefix = TEXT) -> None:
    core.fill("far", Prefix(prefix.keys[:chunks], CHUNK))


def test_a_request_waits_until_everything_announced_is_there() -> None:
    core = one_far()
    assert ask(core).presence is Presence.PROBING
    for chunks in (1, 3, 4):
        wait(core)
        written(core, chunks)
        answer = ask(core)
        assert answer.tokens == chunks * CHUNK
        assert (answer.presence is Presence.PROBING) is (chunks < 4)
    assert core.cache.next_deadline() is None
    core.load_and_run("r", TEXT)
    assert core.loaded()[0].tokens == EVERYTHING


def test_an_announcement_is_stronger_than_a_remembered_absence() -> None:
    core = one_far()
    core.lookup_and_run("before", TEXT)
    written(core, 4)
    assert ask(core).tokens == EVERYTHING


def test_what_is_not_announced_is_not_asked_for_again() -> None:
    core = one_far()
    written(core, 2)
    assert ask(core, tokens=2 * CHUNK).presence is Presence.ARRIVING
    assert ask(core, tokens=2 * CHUNK).tokens == 2 * CHUNK
    asked = core.asked["far"]
    wait(core)
    assert ask(core, tokens=2 * CHUNK).tokens == 2 * CHUNK
    assert core.asked["far"] == asked


@pytest.mark.parametrize("tokens", [EVERYTHING, 10**12, CHUNK])
def test_an_announcement_that_is_not_true_costs_a_bounded_wait(tokens: int) -> None:
    core = one_far()
    assert ask(core, tokens=tokens).presence is Presence.PROBING
    wait(core, STALL_S - 0.001)
    assert ask(core, tokens=tokens).presence is Presence.PROBING
    wait(core, 0.002)
    assert ask(core, tokens=tokens).presence is Presence.ABSENT
    asked = core.asked["far"]
    wait(core)
    assert ask(core, tokens=tokens).presence is Presence.ABSENT, "a wait that is over does not begin again"
    assert core.asked["far"] == asked


def test_less_than_a_chunk_is_no_announcement() -> None:
    assert ask(one_far(), tokens=CHUNK - 1).presence is Presence.ABSENT


def test_what_has_come_when_the_rest_does_not_is_loaded() -> None:
    core = one_far()
    ask(core)
    written(core, 3)
    wait(core)
    ask(core)
    wait(core, STALL_S)
    answer = ask(core)
    assert (answer.tokens, answer.presence) == (3 * CHUNK, Presence.ARRIVING)


def test_each_further_chunk_renews_the_wait_up_to_its_limit() -> None:
    core, prompt = one_far(announced_wait_s=2.0), long_prefix(20)
    seen = []
    for number in range(20):
        written(core, number, prompt)
        seen.append(ask(core, prompt, 20 * CHUNK).presence is Presence.PROBING)
        wait(core, 0.3)
    assert seen == [True] * 7 + [False] * 13, "2 s, although each chunk came within the time of a stall"


@pytest.mark.parametrize(
    ("resident_tokens", "tokens", "limit_s"),
    [
        (0, EVERYTHING, 0.1),
        (0, 2 * CHUNK, 0.05),
        (2 * CHUNK, EVERYTHING, 0.1),
        (2 * CHUNK, 3 * CHUNK, 0.05),
    ],
)
def test_no_wait_is_longer_than_computing_what_the_engine_lacks(
    resident_tokens: int, tokens: int, limit_s: float
) -> None:
    core, given = one_far(), {"compute_s": 0.1, "resident_tokens": resident_tokens}
    assert ask(core, tokens=tokens, **given).presence is Presence.PROBING
    wait(core, limit_s - 0.001)
    assert ask(core, tokens=tokens, **given).presence is Presence.PROBING
    wait(core, 0.002)
    assert ask(core, tokens=tokens, **given).presence is Presence.ABSENT


def test_a_request_does_not_wait_for_what_the_engine_holds() -> None:
    assert ask(one_far(), tokens=2 * CHUNK, resident_tokens=2 * CHUNK).presence is Presence.ABSENT
    core = one_far()
    assert ask(core, tokens=2 * CHUNK).presence is Presence.PROBING
    wait(core)
    assert ask(core, tokens=2 * CHUNK, resident_tokens=2 * CHUNK - 1).presence is Presence.PROBING
    assert ask(core, tokens=2 * CHUNK, resident_tokens=2 * CHUNK).presence is Presence.ABSENT, "computed meanwhile"


def test_a_tier_that_hangs_costs_the_time_of_a_stall() -> None:
    core = one_far()
    core.cache._tiers["far"].hit_rate = 0.0
    core.lookup("r", TEXT, announced_tokens=EVERYTHING, compute_s=10.0)
    wait(core, STALL_S - 0.001)
    assert core.lookup("r", TEXT, announced_tokens=EVERYTHING, compute_s=10.0).presence is Presence.PROBING
    assert len(core.probes) == 1
    wait(core, 0.002)
    assert core.lookup("r", TEXT, announced_tokens=EVERYTHING, compute_s=10.0).presence is Presence.ABSENT


def test_an_engine_whose_steps_are_longer_than_a_stall_asks_again_before_it_gives_up() -> None:
    core = one_far()
    for step, chunks in enumerate((0, 2, 4)):
        written(core, chunks)
        answer = core.lookup("r", TEXT, announced_tokens=EVERYTHING, compute_s=10.0)
        assert answer.presence is Presence.PROBING, step
        core.run()
        wait(core, 1.2 * STALL_S)
    assert core.lookup("r", TEXT, announced_tokens=EVERYTHING, compute_s=10.0).tokens == EVERYTHING


def test_a_tier_that_is_down_costs_no_wait() -> None:
    core = one_far(failures=1)
    core.lookup("r", TEXT, announced_tokens=EVERYTHING, compute_s=10.0)
    core.tell(next(iter(core.probes.values())), None)
    assert core.lookup("r", TEXT, announced_tokens=EVERYTHING, compute_s=10.0).presence is Presence.ABSENT


def test_a_core_without_remote_tiers_does_not_wait() -> None:
    core = Driver()
    core.lookup_and_run("r", TEXT, announced_tokens=EVERYTHING)
    assert core.lookup("r", TEXT, announced_tokens=EVERYTHING).presence is Presence.ABSENT


def test_the_pause_between_two_questions_grows_until_something_is_found() -> None:
    core = one_far()
    times = []
    for _ in range(120):
        asked = core.asked["far"]
        written(core, 2 if core.now_s > 0.06 else 0)
        ask(core)
        if core.asked["far"] > asked:
            times.append(core.now_s)
        wait(core, 0.001)
    gaps = [round(after - before, 3) for before, after in itertools.pairwise(times)]
    assert gaps[:4] == [ASK_AGAIN_S_MIN, 0.01, ASK_AGAIN_S_MAX, ASK_AGAIN_S_MAX]
    assert ASK_AGAIN_S_MIN in gaps[4:]
    assert max(gaps) == ASK_AGAIN_S_MAX


def test_many_requests_that_wait_ask_one_after_the_other() -> None:
    core, requests = one_far(), [f"r{number}" for number in range(2 * ASKING_MAX)]
    prompts = {request: long_prefix(1, request) for request in requests}
    for request in requests:
        ask(core, prompts[request], CHUNK, request)
    wait(core)
    for request in requests:
        core.lookup(request, prompts[request], announced_tokens=CHUNK)
    assert len(core.probes) == ASKING_MAX
    core.run()
    for request in requests:
        core.lookup(request, prompts[request], announced_tokens=CHUNK)
    assert len(core.probes) == ASKING_MAX, "the others"
    for request in requests:
        core.release(request)
    core.run()
    assert core.cache._probes._asking == 0


def test_answers_that_another_request_got_count_at_once() -> None:
    core = one_far()
    assert ask(core).presence is Presence.PROBING
    written(core, 4)
    ask(core, request="other")
    wait(core)
    answer = core.lookup("r", TEXT, announced_tokens=EVERYTHING)
    assert (answer.tokens, answer.presence) == (EVERYTHING, Presence.ARRIVING)
    assert not core.probes


def test_questions_for_announced_chunks_do_not_count_as_misses() -> None:
    core = one_far()
    before = core.cache._tiers["far"].hit_rate
    for _ in range(10):
        ask(core)
        wait(core)
    assert core.cache._tiers["far"].hit_rate == before
    core.lookup_and_run("other", prefix_of("xyz"))
    assert core.cache._tiers["far"].hit_rate < before, "the control"


@pytest.mark.parametrize("hole", [505, 511 - ROUND_NAMES + 1])
def test_a_hole_before_the_last_chunk_is_found_before_the_load(hole: int) -> None:
    core, prompt = one_far(), long_prefix(512)
    written(core, 512, prompt)
    core.held["far"].discard((prompt.keys[hole], 0))
    assert ask(core, prompt, 512 * CHUNK).presence is Presence.PROBING, "its writer has others in flight"
    wait(core)
    assert ask(core, prompt, 512 * CHUNK).tokens == hole * CHUNK
    wait(core)
    written(core, 512, prompt)
    assert ask(core, prompt, 512 * CHUNK).tokens == 512 * CHUNK


def test_a_window_at_the_announced_end_is_waited_for() -> None:
    core = one_far(groups=(History(), Window(2 * CHUNK)))
    for chunk in range(4):
        core.held["far"].add((TEXT.keys[chunk], 0))
    assert ask(core).presence is Presence.PROBING
    for chunk in (2, 3):
        core.held["far"].add((TEXT.keys[chunk], 1))
    wait(core)
    assert ask(core).tokens == EVERYTHING


def test_a_local_drive_is_asked_once_and_the_remote_tier_again() -> None:
    core = near_and_far()
    core.fill("disk", prefix_of("ab"))
    assert ask(core).presence is Presence.PROBING
    for _ in range(5):
        wait(core)
        ask(core)
    assert core.asked["disk"] == 1
    core.fill("far", TEXT)
    wait(core)
    assert ask(core).sources == (("disk", 2 * CHUNK), ("far", 2 * CHUNK))


# ---- the engine that announces ---------------------------------------------------------------------------------------


def publisher(slots: int = 64, *, publishes: bool = True) -> Driver:
    """Of two stores of six chunks each a fast drive has the first. A slow remote tier takes one at a time."""
    core = Driver(
        tiers=(rules("disk"), rules("far", is_remote=True, writes_in_flight=1)), slots=slots, publishes=publishes
    )
    for first, hung in ((0, "far"), (6, "disk")):
        core.store(f"s{first}", long_prefix(12), *((0, chunk) for chunk in range(first, first + 6)))
        core.run(keep=lambda one, hung=hung: one.tier in ("far", hung))
    return core


def published(core: Driver) -> list[int]:
    """The order in which the remote tier gets the chunks."""
    order: list[int] = []
    while going := core.going(Direction.DEMOTE, "far"):
        order += [one.depth for one in going]
        for one in going:
            core.answer(one)
    return order


def test_an_engine_that_publishes_writes_chunks_in_their_order() -> None:
    assert published(publisher()) == list(range(12))
    control = published(publisher(publishes=False))
    assert control == [0, *range(6, 12), *range(1, 6)], "what the drive has comes after what it lacks"


def test_objects_that_wait_to_be_published_hold_a_part_of_host_memory() -> None:
    waiting = [publisher(slots).cache.relays_waiting()["far"] for slots in (8, 16, 24)]
    assert waiting == [3, 1, 0]
    assert sorted(published(publisher(slots=16))) == list(range(12))
