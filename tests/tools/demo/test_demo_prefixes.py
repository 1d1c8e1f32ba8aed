"""The demo's own count of what can be restored, which must not depend on kvtier."""

from hypothesis import given
from hypothesis import strategies as st

from kvtier.tools.demo.request_plan import StoredPrefixes


def test_whole_chunks_of_prompt_and_answer_are_restorable():
    stored = StoredPrefixes(4)
    stored.store([1, 2, 3, 4, 5, 6], [7, 8, 9])
    # 1..8 have KV: two chunks. The next prompt goes on from there.
    assert stored.restorable_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == 8


TOKENS = st.lists(st.integers(0, 2), max_size=14)


@given(st.integers(1, 4), st.lists(st.tuples(TOKENS, TOKENS), max_size=4), TOKENS)
def test_it_agrees_with_comparing_the_tokens_themselves(chunk_tokens, earlier, prompt):
    stored = StoredPrefixes(chunk_tokens)
    for request in earlier:
        stored.store(*request)
    stored = StoredPrefixes(chunk_tokens, stored.digests)  # as the warm pass has them
    known = [[*first, *answer[:-1]] for first, answer in earlier]
    slow = 0
    while (end := slow + chunk_tokens) <= len(prompt) and any(it[:end] == prompt[:end] for it in known):
        slow = end
    assert stored.restorable_tokens(prompt) == max(min(slow, len(prompt) - 1), 0)
