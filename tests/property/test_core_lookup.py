"""The fast path of a lookup is work left out, never another answer: it is compared with the slow path."""

from hypothesis import given
from hypothesis import strategies as st
from tests.core_driver import Driver, prefix_of

from kvtier.core.cache import Cache
from kvtier.core.host_residency import HOST
from kvtier.core.prefix import load_sources
from kvtier.layout import History, Window
from kvtier.types import Lookup, Prefix

TEXTS = st.text("ab", max_size=6)


def slow_lookup(core: Driver, request: str, prefix: Prefix) -> Lookup:
    cache: Cache = core.cache
    has_history_only, cache.host.has_history_only = cache.host.has_history_only, False
    try:
        return core.lookup(request, prefix)
    finally:
        cache.host.has_history_only = has_history_only


@given(
    stored=st.lists(TEXTS, max_size=3),
    below=st.lists(TEXTS, max_size=2),
    asked=st.lists(TEXTS, min_size=1, max_size=4),
    is_answered=st.booleans(),
    has_window=st.booleans(),
)
def test_the_fast_path_of_lookup_says_what_the_slow_path_says(
    stored: list[str], below: list[str], asked: list[str], is_answered: bool, has_window: bool
) -> None:
    core = Driver(groups=(History(), Window(5)) if has_window else (History(),), slots=16)
    for text in below:
        core.fill("disk", prefix_of(text))
    for number, text in enumerate(stored):
        core.store(f"s{number}", prefix_of(text))
        core.run()
    for text in asked:
        prefix = prefix_of(text)
        fast = core.lookup("r", prefix)
        assert fast == slow_lookup(core, "r", prefix)
        if is_answered:
            core.run()
            assert core.lookup("r", prefix) == slow_lookup(core, "r", prefix)


PLACES = (HOST, "disk", "shared")


@given(
    text=st.text("a", max_size=6),
    places=st.dictionaries(st.tuples(st.integers(0, 1), st.integers(0, 5)), st.sampled_from(PLACES)),
    resident=st.integers(0, 30),
    data=st.data(),
)
def test_sources_add_up_to_the_tokens_past_what_is_resident(
    text: str, places: dict[tuple[int, int], str], resident: int, data: st.DataObject
) -> None:
    prefix = prefix_of(text)
    tokens = data.draw(st.sampled_from(range(0, 4 * len(text) + 1, 4)))
    sources = load_sources(prefix, tokens, places, PLACES, resident)
    assert sum(count for _, count in sources) == max(0, tokens - resident)
    assert [name for name, _ in sources] == [name for name in PLACES if name in dict(sources)]
