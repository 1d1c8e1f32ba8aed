"""The demo's own count of what can be restored, which must not depend on kvtier."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.bench.demo_ledger import ENTRIES_MAX, Entry, Ledger, forget_without_store, read_ledger
from kvtier.bench.demo_oracle import StoredPrefixes


def test_nothing_stored_nothing_restorable():
    assert StoredPrefixes(4).restorable_tokens(list(range(100))) == 0


def test_whole_chunks_of_prompt_and_answer_are_restorable():
    stored = StoredPrefixes(4)
    stored.store([1, 2, 3, 4, 5, 6], [7, 8, 9])
    # 1..8 have KV: two chunks. The next prompt goes on from there.
    assert stored.restorable_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == 8


def test_the_last_token_of_an_answer_has_no_kv():
    stored = StoredPrefixes(4)
    stored.store([1, 2, 3, 4, 5, 6], [7, 8])
    assert stored.restorable_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == 4


def test_the_token_that_must_be_computed_does_not_count():
    stored = StoredPrefixes(4)
    stored.store(list(range(12)), [0])
    assert stored.restorable_tokens(list(range(8))) == 7
    assert stored.restorable_tokens(list(range(9))) == 8
    assert stored.restorable_tokens([0]) == 0
    assert stored.restorable_tokens([]) == 0


def test_a_chunk_counts_only_with_all_that_comes_before_it():
    stored = StoredPrefixes(2)
    stored.store([1, 2, 3, 4, 5, 6], [0])
    assert stored.restorable_tokens([9, 2, 3, 4, 5, 6, 7]) == 0
    assert stored.restorable_tokens([1, 2, 9, 4, 5, 6, 7]) == 2


def test_an_impossible_chunk_is_refused():
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1, got 0"):
        StoredPrefixes(0)


TOKENS = st.lists(st.integers(0, 2), max_size=14)


@given(st.integers(1, 4), st.lists(st.tuples(TOKENS, TOKENS), max_size=4), TOKENS)
def test_it_agrees_with_comparing_the_tokens_themselves(chunk_tokens, earlier, prompt):
    stored = StoredPrefixes(chunk_tokens)
    for request in earlier:
        stored.store(*request)
    known = [[*first, *answer[:-1]] for first, answer in earlier]
    slow = 0
    while (end := slow + chunk_tokens) <= len(prompt) and any(it[:end] == prompt[:end] for it in known):
        slow = end
    assert stored.restorable_tokens(prompt) == max(min(slow, len(prompt) - 1), 0)


def test_what_is_stored_can_be_handed_on():
    stored = StoredPrefixes(2)
    stored.store([1, 2, 3, 4], [5])
    assert StoredPrefixes(2, stored.digests).restorable_tokens([1, 2, 3, 4, 5]) == 4


def test_the_ledger_gives_back_the_latest_call_of_the_same_model(tmp_path):
    ledger = Ledger()
    for number, identity in enumerate(["a", "b", "a", "b"]):
        ledger = ledger.with_entry(Entry(f"space{number}", identity, 256, (f"digest{number}",)))
    ledger.write(tmp_path)
    found = read_ledger(tmp_path)
    assert found == ledger
    assert found.latest("a") == Entry("space2", "a", 256, ("digest2",))
    assert found.latest("c") is None
    assert [it.name for it in tmp_path.iterdir()] == ["demo.json"]


def test_the_ledger_replaces_a_namespace_and_forgets_the_oldest():
    ledger = Ledger()
    for number in range(ENTRIES_MAX + 3):
        ledger = ledger.with_entry(Entry(f"space{number}", "a", 256, ()))
    ledger = ledger.with_entry(Entry("space5", "a", 256, ("more",)))
    assert len(ledger.entries) == ENTRIES_MAX
    assert ledger.entries[-1] == Entry("space5", "a", 256, ("more",))
    assert [it.namespace for it in ledger.entries].count("space5") == 1


@pytest.mark.parametrize("content", [b"", b"[]", b'{"version": 9, "entries": []}', b'{"version": 1}', b"\xff", b"7"])
def test_a_damaged_ledger_means_no_earlier_call(tmp_path, content):
    (tmp_path / "demo.json").write_bytes(content)
    assert read_ledger(tmp_path) == Ledger()


def test_no_ledger_means_no_earlier_call(tmp_path):
    assert read_ledger(tmp_path / "nowhere") == Ledger()


def test_a_ledger_whose_store_was_purged_goes_and_other_files_stay(tmp_path):
    Ledger().with_entry(Entry("space", "a", 256, ())).write(tmp_path)
    (tmp_path / "kvtier-store.json").write_text("{}")
    forget_without_store(tmp_path)
    assert read_ledger(tmp_path).entries
    (tmp_path / "kvtier-store.json").unlink()
    forget_without_store(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "demo.json").write_text('{"somebody": "else"}')
    forget_without_store(tmp_path)
    assert [it.name for it in tmp_path.iterdir()] == ["demo.json"]
