"""SGLang's real engine and server on a CPU: the same greedy tokens, whatever kvtier restores, lacks or waits for.

The weights are random, and every token of a prompt counts: `test_wrong_pages_change_the_tokens` is the control.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sabotage
from engines import BACKEND
from server import OUTPUT_TOKENS, PAGE, WAITS, Server, flags, offline, prompt, sampling
from tests.faults.hanging_fs import HangingFs, hanging_fs, missing
from tests.leftovers import contents, forms_of_tokens, left
from tests.vllm.models import make_checkpoint
from tests.waiting import wait_until

WHOLE = 640
"""The pages of a prompt of 700 tokens. The last token is always computed."""

SLACK_S = 4.0
"""For a busy machine, beyond kvtier's deadlines."""


class Place:
    """What the tests share: two models of the same shape, a store and servers' logs."""

    def __init__(self, root: Path) -> None:
        self.root, self.store, self.flag = root, root / "store", root / "flag"
        self.model, self.other = root / "model", root / "other"
        make_checkpoint("llama", self.model, seed=7)
        make_checkpoint("llama", self.other, seed=8)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Models and an empty store."""
    return Place(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def servers(place: Place) -> Iterator[list[Server]]:
    """Two servers with the flags that `kvtier sglang config` prints, of two models with the same store.

    In the second one the file `place.flag` breaks kvtier.
    """
    given, broken = [*flags(place.store), *WAITS], ("repeat_pages", "borrow_identity")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv(sabotage.FLAG, str(place.flag))
        made = [
            stack.enter_context(Server(place.model, place.root / "server.log", *given)),
            stack.enter_context(Server(place.other, place.root / "other.log", *given, sabotage=broken)),
        ]
        for each in made:
            each.await_up()
        yield made


@pytest.fixture
def server(servers: list[Server]) -> Server:
    """A server as its users have it."""
    return servers[0]


@pytest.fixture
def other(servers: list[Server], place: Place) -> Iterator[Server]:
    """The server of another model, whole again after the test."""
    yield servers[1]
    place.flag.unlink(missing_ok=True)


@pytest.mark.sglang_core
def test_tokens_are_equal_from_each_place(server: Server) -> None:
    """Again; after a flush, when others have its host memory; and when others have its device memory."""
    asked, others = prompt(1), [prompt(seed) for seed in (2, 3, 4)]
    first = server.ask_and_keep(asked)
    again = server.ask(asked)
    server.forget()
    for each in others:
        server.ask(each)
    restored = server.ask(asked)
    for each in others:
        server.ask(each)
    evicted = server.ask(asked)
    found = [answer.cached for answer in (first, again, restored, evicted)]
    assert found == [{}, {"device": WHOLE}, {"storage": WHOLE}, {"host": WHOLE}]
    assert len(first.tokens) == OUTPUT_TOKENS
    assert again.tokens == restored.tokens == evicted.tokens == first.tokens
    assert server.total("sglang:cached_tokens_total", 'cache_source="storage"') == WHOLE
    assert server.total("sglang:kvtier_objects_total", 'way="read"', 'outcome="done"') == WHOLE // PAGE


@pytest.mark.sglang_core
def test_a_request_cannot_opt_out_and_none_of_its_names_reaches_the_store(server: Server, place: Place) -> None:
    """SGLang passes a storage backend digests of pages and their positions, and no field of a request."""
    hints = {"store": False, "max_offload_tokens": 0}
    said = {
        "rid": "hidden-rid",
        "sampling_params": sampling() | {"custom_params": {**hints, "kv_transfer_params": hints}},
        "no_logs": True,
        **{name: f"hidden-{name}" for name in ("extra_key", "cache_salt", "routing_key", "conversation_id")},
    }
    asked, before = prompt(13), objects(place.store)
    first = server.ask_and_keep(asked, **said)
    server.forget()
    restored = server.ask(asked, **said | {"rid": "hidden-rid-2"})
    assert (restored.cached, restored.tokens) == ({"storage": WHOLE}, first.tokens)
    assert len(objects(place.store) - before) >= WHOLE // PAGE
    forms = forms_of_tokens(asked) | {"name": [b"hidden-"]}
    lines = [line for line in server.log().splitlines() if "kvtier" in line]
    assert left(forms, {"store": contents(place.store), "log": "\n".join(lines).encode()}) == {}, lines


@pytest.mark.sglang_core
def test_the_offline_engine_restores_what_the_server_stored(server: Server, place: Place) -> None:
    """A new process with the same store; a prompt that shares its beginning; and one that was never asked."""
    asked = prompt(5)
    first = server.ask_and_keep(asked)
    beginning = [*asked[: 4 * PAGE], *prompt(6, 300)]
    expected = server.ask(beginning)
    restored, begun, new = offline(place.model, *flags(place.store), *WAITS, prompts=[asked, beginning, prompt(7)])
    assert (restored.cached, restored.tokens) == ({"storage": WHOLE}, first.tokens)
    assert begun.tokens == expected.tokens
    assert new.cached == {}


@pytest.mark.sglang_core
def test_damaged_pages_shorten_the_hit_and_heal(server: Server, place: Place) -> None:
    """One bit in each file of the pages after the fifth."""
    asked = prompt(8)
    server.ask_and_keep(asked[: 5 * PAGE + 1])
    before = objects(place.store)
    first = server.ask_and_keep(asked)
    damaged = objects(place.store) - before
    assert len(damaged) == 6
    printed = len(server.log())
    for file in damaged:
        flip(file)
    server.forget()
    assert server.ask(asked) == first._replace(device=0, storage=5 * PAGE)
    await_restored(server, asked, first.tokens)
    assert "Traceback" not in server.log()[printed:]


@pytest.mark.sglang_core
def test_a_foreign_model_restores_nothing(server: Server, other: Server, place: Place) -> None:
    """Other weights of the same shape in the same store. The control: kvtier takes one model for the other."""
    asked = prompt(9)
    own = server.ask_and_keep(asked)
    foreign = other.ask_and_keep(asked)
    assert foreign.cached == {}
    assert foreign.tokens != own.tokens
    other.forget()
    assert other.ask(asked) == foreign._replace(storage=WHOLE)
    place.flag.write_text(str(place.model))
    other.attach(extra(place.store))
    other.forget()
    wrong = other.ask(asked)
    assert wrong.cached == {"storage": WHOLE}
    assert wrong.tokens != foreign.tokens


def test_a_checkpoint_that_is_replaced_while_sglang_starts_gives_its_name_to_nothing(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else KV of the old weights would have the new ones' name, and a correct server would restore it."""
    model, flag, asked = tmp_path / "model", tmp_path / "flag", prompt(12)
    shutil.copytree(place.model, model)
    flag.write_text(str(place.other))
    monkeypatch.setenv(sabotage.FLAG, str(flag))
    given, broken = [*flags(tmp_path / "store"), *WAITS], ["replace_checkpoint"]
    with Server(model, tmp_path / "first.log", *given, sabotage=broken) as first:
        first.await_up()
        old = first.ask(asked)
        first.forget()
        assert first.ask(asked) == old, "nothing is restored"
        assert "has changed since SGLang began to read it" in first.log()
    with Server(model, tmp_path / "second.log", *given) as second:
        second.await_up()
        new = second.ask_and_keep(asked)
        assert new.cached == {}
        assert new.tokens != old.tokens
        second.forget()
        assert second.ask(asked) == new._replace(storage=WHOLE)


@pytest.mark.sglang_core
def test_wrong_pages_change_the_tokens(other: Server, place: Place) -> None:
    """The control of all tests here: every second page repeats the page before."""
    asked = prompt(10)
    other.attach(extra(place.store))
    first = other.ask_and_keep(asked)
    place.flag.write_text(sabotage.REPEATED)
    other.forget()
    wrong = other.ask(asked)
    assert wrong.cached == {"storage": WHOLE}
    assert wrong.tokens != first.tokens


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[HangingFs]:
    """A file system that hangs on demand."""
    if missing():
        pytest.skip(missing())
    yield from hanging_fs(tmp_path)


@pytest.mark.sglang_core
def test_a_tier_that_hangs_costs_its_deadline(other: Server, place: Place, hanging: HangingFs) -> None:
    """Reads hang, then every call does: the prompt is computed. Later the tier is used again."""
    limits = {
        "limits": {"load_deadline_s": 1.0, "close_deadline_s": 2.0},
        "tiers.directory.probe_deadline_s": 0.3,
        "tiers.directory.transfer_deadline_s": 20.0,  # so that the load's deadline is what ends it
        "tiers.directory.retry_s": 0.2,
    }
    other.attach({**extra(hanging.place / "store"), **limits})
    asked = prompt(11)
    first = other.ask_and_keep(asked)

    for whats in (("read", "open"), ("everything",)):
        await_restored(other, asked, first.tokens)
        other.forget()
        hanging.hang(*whats)
        began_s = time.monotonic()
        answer = other.ask(asked)
        assert time.monotonic() - began_s < 1.3 + SLACK_S
        assert hanging.waiting()
        assert answer == first
        hanging.go_on()
    await_restored(other, asked, first.tokens)
    other.attach(extra(place.store))  # the file system goes, and nothing uses it


@pytest.mark.parametrize(
    ("layout", "backend", "ranks"),
    [("page_first_direct", "direct", 1), ("layer_first", "direct", 1), ("page_head", "kernel", 2)],
)
def test_other_layouts_and_two_ranks(place: Place, tmp_path: Path, layout: str, backend: str, ranks: int) -> None:
    """Pages of another order, and of half the heads: whole, then with a damaged file."""
    store, asked = tmp_path / "store", prompt(12)
    given = [*flags(store), *WAITS, "--hicache-mem-layout", layout, "--hicache-io-backend", backend]
    with Server(place.model, tmp_path / "log", *given, ranks=ranks) as server:
        server.await_up()
        server.ask_and_keep(asked[:WHOLE])
        pages = objects(store)
        assert len(pages) == WHOLE // PAGE * ranks
        first = server.ask_and_keep(asked)
        assert len(objects(store)) == 11 * ranks, "the last page holds tokens of the answer, and nothing reads it again"
        flipped = max(pages)
        for is_damaged in (False, True):
            server.forget()
            for seed in (2, 3):  # others take its host memory
                server.ask(prompt(seed))
            if is_damaged:
                flip(flipped)
            answer = server.ask(asked)
            assert answer.tokens == first.tokens
            assert answer.cached.keys() <= {"storage"}
            assert (answer.storage < WHOLE) == is_damaged
        assert layout in server.log()


@pytest.mark.parametrize(("core", "tree"), [("python", "UnifiedTreeCore"), ("rust", "RustUnifiedTreeCore")])
def test_host_memory_that_is_only_a_buffer(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, core: str, tree: str
) -> None:
    """SGLang keeps nothing in host memory: what leaves device memory comes from the store. Both cores of its tree."""
    store, asked = tmp_path / "store", prompt(14)
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", core)
    given = [*flags(store), *WAITS, "--hicache-host-memory-mode", "buffer_only"]
    with Server(place.model, tmp_path / "log", *given) as server:
        server.await_up()
        first = server.ask_and_keep(asked)
        again = server.ask(asked)
        for seed in (2, 3, 4):  # they take its device memory
            server.ask(prompt(seed))
        evicted = server.ask(asked)
        assert [it.cached for it in (first, again, evicted)] == [{}, {"device": WHOLE}, {"storage": WHOLE}]
        flip(min(objects(store)))
        server.forget()
        damaged = server.ask(asked)
        assert again.tokens == evicted.tokens == damaged.tokens == first.tokens
        assert f"Tree Core: {tree}" in server.log()
        assert "'hicache_host_memory_mode': 'buffer_only'" in server.log()


def objects(store: Path) -> set[Path]:
    """The files of all objects with a page."""
    return {it for it in (store / "objects").rglob("*") if it.is_file() and it.stat().st_size > PAGE * 256}


def flip(file: Path) -> None:
    """Change one bit, in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def await_restored(server: Server, asked: list[int], tokens: list[int]) -> None:
    """Wait until all of a prompt comes from the store; each answer until then has the same tokens."""

    def is_restored() -> bool:
        server.forget()
        answer = server.ask(asked)
        assert answer.tokens == tokens
        return answer.cached == {"storage": WHOLE}

    wait_until(is_restored, "the whole prompt", pause_s=1.0)  # a backup needs some time before the next flush


def extra(store: Path) -> dict[str, Any]:
    """The extra config of a server with a directory tier."""
    return {**BACKEND, "tiers": [f"directory:{store}"]}
