"""A survey names every place of every chunk, asks remote tiers in small pieces, and changes nothing else."""

from tests.core_driver import CHUNK, Driver, key, prefix_of

from kvtier.core import survey as module
from kvtier.core.limits import TierRules
from kvtier.core.survey import Survey
from kvtier.layout import History, Window
from kvtier.types import Prefix

FAR = TierRules(name="far", is_remote=True, probe_deadline_s=1.0, failures=1, retry_s=5.0)


def begun(core: Driver, prefix: Prefix) -> Survey:
    survey = core.cache.survey(prefix, core.now_s)
    core._take()
    return survey


def test_every_tier_is_asked_for_every_chunk_also_for_what_host_memory_has() -> None:
    core = Driver(tiers=("disk", "shared"), slots=3)
    core.store_and_run("a", prefix_of("ab"))
    core.held["disk"] = {(key("a"), 0)}
    core.held["shared"] = {(key("a"), 0), (key("abc"), 0)}
    survey = begun(core, prefix_of("abcd"))
    core.run()
    assert [survey.places(chunk) for chunk in range(4)] == [
        {"host": "all", "disk": "all", "shared": "all"},
        {"host": "all"},
        {"shared": "all"},
        {},
    ]
    assert (survey.tokens, survey.history_chunks, survey.unasked, survey.silent) == (3 * CHUNK, 3, {}, {})


def test_a_chunk_of_which_only_some_groups_are_there_is_held_in_part_and_loads_nothing() -> None:
    core = Driver(groups=(History(), History(), Window(CHUNK)))
    core.held["disk"] = {(key("a"), 0), (key("a"), 2)}
    survey = begun(core, prefix_of("a"))
    core.run()
    assert (survey.places(0), survey.tokens) == ({"disk": "part"}, 0)
    core.held["disk"].add((key("a"), 1))
    survey = begun(core, prefix_of("a"))
    core.run()
    assert (survey.places(0), survey.tokens) == ({"disk": "all"}, CHUNK)
    core.held["disk"].remove((key("a"), 2))
    survey = begun(core, prefix_of("a"))
    core.run()
    assert (survey.places(0), survey.tokens, survey.history_chunks) == ({"disk": "all"}, 0, 1)


def test_a_remote_tier_is_asked_for_few_names_at_a_time_and_its_answers_are_remembered(monkeypatch) -> None:
    monkeypatch.setattr("kvtier.core.tier_searches.REMOTE_NAMES", 3)
    core = Driver(tiers=("disk", FAR))
    prompt = prefix_of("abcdefgh")
    core.held["far"] = {(one, 0) for one in prompt.keys[:5]}
    survey, sizes = begun(core, prompt), []
    while far := [probe for probe in core.probes.values() if probe.tier == "far"]:
        sizes.append(len(far[0].objects))
        core.tell(far[0], [item in core.held["far"] for item in far[0].objects])
    core.run()
    assert (sizes, survey.tokens) == ([3, 3, 2], 5 * CHUNK)
    core.lookup_and_run("r", prompt)
    assert core.asked["far"] == 3, "the lookup needs no further probe of it"


def test_a_tier_that_is_down_or_fails_is_named_and_not_asked_again() -> None:
    core = Driver(tiers=("disk", FAR))
    survey = begun(core, prefix_of("ab"))
    (far,) = (probe for probe in core.probes.values() if probe.tier == "far")
    core.tell(far, None)
    core.run()
    assert (survey.silent, survey.unasked) == ({"far": "did not answer"}, {})
    assert not core.cache.is_up("far")
    survey = begun(core, prefix_of("ab"))
    assert (survey.silent, [probe.tier for probe in core.probes.values()]) == ({"far": "is down"}, ["disk"])


def test_an_overdue_answer_ends_the_survey_of_that_tier() -> None:
    core = Driver(tiers=(FAR,))
    survey = begun(core, prefix_of("ab"))
    core.wait(1.5)
    assert (survey.silent, survey.unasked) == ({"far": "did not answer"}, {})


def test_a_survey_that_was_stopped_takes_no_answer_and_asks_no_more(monkeypatch) -> None:
    monkeypatch.setattr("kvtier.core.tier_searches.REMOTE_NAMES", 1)
    core = Driver(tiers=("disk", FAR))
    survey = begun(core, prefix_of("ab"))
    survey.stop()
    before = (dict(survey.silent), {tier: list(items) for tier, items in survey.unasked.items()})
    for probe in list(core.probes.values()):
        core.tell(probe, [True] * len(probe.objects))
    assert before == (survey.silent, survey.unasked)
    assert before[0] == {"disk": "did not answer in time", "far": "did not answer in time"}
    assert (core.probes, survey.places(0)) == ({}, {})


def test_a_long_prompt_is_surveyed_in_part(monkeypatch) -> None:
    monkeypatch.setattr(module, "CHUNKS_MAX", 3)
    core = Driver()
    survey = begun(core, prefix_of("abcdef"))
    assert (len(survey.prefix.keys), len(next(iter(core.probes.values())).objects)) == (3, 3)


def test_without_a_tier_host_memory_answers_and_names_what_has_left_it() -> None:
    core = Driver(tiers=(), slots=2)
    core.store_and_run("a", prefix_of("ab"))
    core.store_and_run("b", prefix_of("yz"))
    survey = begun(core, prefix_of("abc"))
    assert (survey.unasked, survey.tokens) == ({}, 0)
    assert [survey.has_left(chunk) for chunk in range(3)] == [True, True, False]


def test_clearing_frees_what_no_transfer_needs() -> None:
    core = Driver(slots=4)
    core.store_and_run("a", prefix_of("ab"))
    core.store("b", prefix_of("z"))  # its gather is under way
    assert core.cache.clear(core.now_s) == (2, 1)
    core._take()
    core.cache.check()
    assert core.lookup("r", prefix_of("ab")).ready_tokens == 0
    core.run()
    assert core.lookup("s", prefix_of("z")).ready_tokens == CHUNK, "what had begun is complete"
