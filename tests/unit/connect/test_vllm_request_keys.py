"""Two requests share a chunk exactly when everything that determines its numbers is equal, from the first token on."""

import errno
import os
import threading
import time
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.vllm_config import request, vllm_config

from kvtier.connect.model_files import adapter_versions
from kvtier.connect.vllm.checkpoint_reads import AdapterRead
from kvtier.connect.vllm.requests import keys as module
from kvtier.connect.vllm.requests import multimodal_items as items_module
from kvtier.connect.vllm.requests.keys import KeyMaker
from kvtier.connect.vllm.requests.tracked import TrackedRequest
from kvtier.keys.chain import Extra, chunk_keys
from kvtier.types import ChunkKey

ROOT = bytes(range(32))
TOKENS = list(range(1, 1001))


@pytest.fixture(autouse=True)
def own_home(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


def keys(made: Any, requests: KeyMaker | None = None) -> tuple[ChunkKey, ...]:
    found = (requests or KeyMaker(ROOT, 256, vllm_config())).begin(made)
    assert found is not None
    found.extend(made.all_token_ids)
    return found.prefix().keys


def shared(first: Any, second: Any, requests: KeyMaker | None = None) -> int:
    """Leading chunks that two requests have in common."""
    pairs = zip(keys(first, requests), keys(second, requests), strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), 3)


# ---- a moment without memory -------------------------------------------------------------------------------------


def test_a_moment_without_memory_costs_one_requests_keys(monkeypatch, caplog):
    maker = KeyMaker(ROOT, 256, vllm_config())
    with monkeypatch.context() as patch:
        for name, fail in (("_chain", MemoryError()), ("_extras", OSError(errno.EMFILE, "too many open files"))):
            patch.setattr(maker, name, raising(fail))
            assert maker.begin(request(TOKENS)) is None
        assert maker.extras(request(TOKENS)) is None
        patch.setattr(maker, "_extras", raising(KeyError()))
        with pytest.raises(KeyError):
            maker.begin(request(TOKENS))
    assert [it.getMessage().split(": ")[1].split(" (")[0] for it in caplog.records] == [
        "MemoryError",
        "[Errno 24] too many open files",
    ]
    assert keys(request(TOKENS), maker) == chunk_keys(ROOT, TOKENS, 256)


def raising(error: Exception) -> Any:
    def fail(*_: object) -> None:
        raise error

    return fail


# ---- tokens ------------------------------------------------------------------------------------------------------


def test_a_plain_request_has_the_plain_chain():
    assert keys(request(TOKENS)) == chunk_keys(ROOT, TOKENS, 256)


def test_requests_share_up_to_the_first_other_token():
    other = [*TOKENS[:600], 7, *TOKENS[601:]]
    assert shared(request(TOKENS), request(TOKENS)) == 3
    assert shared(request(TOKENS), request(other)) == 2


def test_with_draft_layers_requests_share_chunks_whose_next_token_is_the_same():
    drafting = KeyMaker(ROOT, 256, vllm_config(num_prefill_lookahead_tokens=1))
    for other, chunks in ((512, 1), (511, 1), (513, 2)):
        changed = [*TOKENS[:other], 7, *TOKENS[other + 1 :]]
        assert shared(request(TOKENS), request(changed), drafting) == chunks
    assert shared(request(TOKENS), request([*TOKENS[:512], 7, *TOKENS[513:]])) == 2


def growing(tokens: Any) -> TrackedRequest:
    """The scheduler's view of a request whose tokens are replaced as it grows."""
    made = request(tokens)
    return TrackedRequest(made, 0, KeyMaker(ROOT, 256, vllm_config()).begin(made))


def test_a_growing_request_has_the_keys_of_its_tokens_so_far():
    found = growing([])
    for count in (0, 255, 256, 700, 701, 768, 1000):
        found.request.all_token_ids = TOKENS[:count]
        assert found.prefix(count).keys == chunk_keys(ROOT, TOKENS[:count], 256)


def test_a_prefix_ends_where_it_is_asked_to():
    found = growing(TOKENS)
    assert found.prefix(767).keys == chunk_keys(ROOT, TOKENS, 256)[:2]
    assert found.prefix(768).keys == chunk_keys(ROOT, TOKENS, 256)[:3]
    with pytest.raises(ValueError, match=r"0\.\.1000, got 1001"):
        found.prefix(1001)


def test_tokens_that_were_taken_back_get_no_key():
    found = growing(TOKENS)
    found.prefix(1000)
    found.request.all_token_ids = [*TOKENS[:300], *range(5000, 5300)]
    with pytest.raises(ValueError, match="request r has 600 tokens, but had 1000 before"):
        found.prefix(600)


def test_extending_costs_time_for_the_new_tokens_only():
    """By count, not by clock: what is read of a long prompt is its end."""
    read: list[slice] = []

    class Watched(list[int]):
        def __getitem__(self, at: Any) -> Any:
            read.append(at)
            return super().__getitem__(at)

    found = growing(Watched(TOKENS[:900]))
    found.prefix(768)
    found.request.all_token_ids = Watched(TOKENS)
    found.prefix(1000)
    assert read == [slice(0, None), slice(900, None)]


# ---- salt and epoch ----------------------------------------------------------------------------------------------


def test_a_salt_counts_from_the_first_token_on():
    a, b, none, half = (request(TOKENS, cache_salt=salt) for salt in ("a", "b", None, "\ud800"))
    assert (shared(a, a), shared(a, b), shared(a, none), shared(none, none)) == (3, 0, 0, 3)
    assert (shared(half, half), shared(half, none)) == (3, 0), "half of a surrogate pair, which is no UTF-8"


def test_after_a_reset_nothing_from_before_is_found():
    requests = KeyMaker(ROOT, 256, vllm_config())
    before = keys(request(TOKENS), requests)
    requests.new_epoch()
    after = keys(request(TOKENS), requests)
    assert not set(before) & set(after)
    assert keys(request(TOKENS), requests) == after
    requests.new_epoch()
    assert not set(keys(request(TOKENS), requests)) & {*before, *after}


# ---- images ------------------------------------------------------------------------------------------------------


class ItemData(UserDict[str, Any]):
    """Data of an item, with the fields of vLLM's `MultiModalKwargsItem`."""

    def __init__(self, **fields: object) -> None:
        super().__init__({name: SimpleNamespace(data=value) for name, value in fields.items()})


class OutOfMemory(ItemData):
    def items(self):
        raise MemoryError


def item(identifier: str, offset: int, length: int = 40, data: ItemData | str | None = "of the identifier") -> Any:
    place = SimpleNamespace(offset=offset, length=length)
    if isinstance(data, str):
        data = pixels(sum(identifier.encode()))
    return SimpleNamespace(modality="image", identifier=identifier, mm_position=place, data=data)


def pixels(seed: int, **others: object) -> ItemData:
    values = torch.arange(seed, seed + 48, dtype=torch.float32).reshape(3, 4, 4)
    return ItemData(pixel_values=values.to(torch.bfloat16), grid=[torch.tensor([1, 4, 4])], **others)


@pytest.mark.parametrize(
    ("one", "other", "chunks"),
    [
        ([("cat", 600)], [("cat", 600)], 3),
        ([("cat", 600)], [("dog", 600)], 2),
        ([("cat", 600)], [], 2),
        ([("cat", 300)], [("cat", 310)], 1),
        ([("cat", 300)], [("cat", 300, 41)], 1),
        ([("cat", 10), ("dog", 100)], [("dog", 10), ("cat", 100)], 0),
    ],
)
def test_an_image_counts_with_its_place_from_where_it_begins(one, other, chunks):
    requests = [request(TOKENS, mm_features=[item(*each) for each in images]) for images in (one, other)]
    assert shared(*requests) == chunks


def test_images_that_vllm_only_numbers_are_not_cached(caplog):
    config = vllm_config(
        cache__enable_prefix_caching=False, model__multimodal_config=SimpleNamespace(mm_processor_cache_gb=0)
    )
    requests = KeyMaker(ROOT, 256, config)
    for params in ({"store": False}, {"store": 0}, [7]):  # of one that opts out nothing is said
        hidden = request(TOKENS, mm_features=[item("hidden", 3)], kv_transfer_params=params)
        assert requests.begin(hidden) is None
    assert (caplog.records, requests.refusal, requests._logged) == ([], "", set())
    assert requests.begin(request(TOKENS, mm_features=[item("renderer0-mm-1-image-0", 3)])) is None
    assert requests.begin(request(TOKENS, mm_features=[item("renderer0-mm-2-image-0", 3)])) is None
    assert requests.begin(request(TOKENS)) is not None
    (result,) = caplog.records
    assert "request r is not cached" in result.message
    config.model_config.multimodal_config.mm_processor_cache_gb = 4
    assert requests.begin(request(TOKENS, mm_features=[item("a1b2", 3)])) is not None


def one_image(number: int, data: ItemData | None, name: str = "logo") -> Any:
    return request(TOKENS, request_id=f"r{number}", mm_features=[item(name, 300, data=data)])


def test_the_same_name_for_another_image_is_another_identity():
    """In engines of their own, as on two nodes with a shared store: a client names its images as it likes."""
    first, second, again = (one_image(0, pixels(seed)) for seed in (0, 1, 0))
    assert (shared(first, second), shared(first, again)) == (1, 3)


@pytest.mark.parametrize(
    "other",
    [
        {"pixel_values": torch.ones(4, dtype=torch.bfloat16)},
        {"pixel_values": torch.ones(2, 2)},
        {"pixel_values": [torch.ones(2), torch.ones(2)]},
        {"pixel_values": np.ones((2, 2), np.float64)},
        {"images": torch.ones(4)},
        {"pixel_values": torch.ones(4), "count": 1},
    ],
)
def test_every_part_of_the_data_counts(other):
    made = {"pixel_values": torch.ones(4)}
    assert shared(one_image(0, ItemData(**made)), one_image(0, ItemData(**other))) == 1
    assert shared(one_image(0, ItemData(**other)), one_image(0, ItemData(**other))) == 3


def test_a_name_that_has_meant_two_images_is_not_cached_any_more(caplog):
    """vLLM keeps what it has computed under the name, and may use it for either image."""
    doubted: list[str] = []
    requests = KeyMaker(ROOT, 256, vllm_config(), doubted=doubted.append)
    assert requests.begin(one_image(0, pixels(0))) is not None
    assert requests.begin(one_image(1, pixels(0))) is not None, "the same image once more"
    assert not doubted
    assert requests.begin(one_image(2, pixels(1))) is None
    assert requests.begin(one_image(3, pixels(0))) is None
    assert requests.begin(one_image(4, pixels(0), "cat")) is not None
    assert doubted == ["logo"]
    assert "'logo', had other data before" in caplog.records[0].message


@pytest.mark.parametrize("refused", [{"prompt_embeds": object()}, {"lora_request": None, "pooling_params": object()}])
def test_an_image_counts_also_in_a_request_that_is_not_cached(refused):
    requests = KeyMaker(ROOT, 256, vllm_config())
    unrelated = one_image(0, pixels(0))
    for name, value in refused.items():
        setattr(unrelated, name, value)
    assert requests.begin(unrelated) is None
    assert requests.begin(one_image(1, pixels(1))) is None


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "comes without data"),
        (ItemData(address=4096, monotonic_id=1, signature=[1]), "shared memory"),
        (pixels(0, other=object()), "/other is of class object"),
        (pixels(0, other={"a": {1, 2}}), "/other/a is of class set"),
        (object(), "cannot be digested"),
        (OutOfMemory(), "cannot be digested"),
        ({"pixel_values": torch.ones(4)}, "cannot be digested"),
    ],
)
def test_an_image_without_readable_data_is_not_cached(data, reason):
    requests = KeyMaker(ROOT, 256, vllm_config())
    assert requests.begin(one_image(0, data)) is None
    assert reason in requests.refusal
    assert requests.begin(one_image(1, pixels(0))) is None, "vLLM may reuse what it has computed for the first"
    assert requests.begin(request(TOKENS)) is not None


def test_an_image_whose_data_is_too_large_to_digest_is_not_cached(monkeypatch):
    monkeypatch.setattr(items_module, "ITEM_BYTES_MAX", 100)
    requests = KeyMaker(ROOT, 256, vllm_config())
    assert requests.begin(one_image(0, ItemData(pixel_values=torch.ones(26)))) is None
    assert "bytes of data; allowed: at most 100 for all items" in requests.refusal
    several = [item(str(number), 100 * number, data=ItemData(pixel_values=torch.ones(20))) for number in range(2)]
    assert requests.begin(request(TOKENS, mm_features=several)) is None, "together they are too large"
    assert requests.begin(request(TOKENS, mm_features=several[:1])) is not None
    assert requests.begin(one_image(0, ItemData(pixel_values=torch.ones(25)), "cat")) is not None


def test_data_that_vllm_passes_again_is_digested_once(monkeypatch):
    digested: list[int] = []
    inner = items_module.digest_tensors
    monkeypatch.setattr(items_module, "digest_tensors", lambda leaves: digested.append(1) or inner(leaves))
    requests, data = KeyMaker(ROOT, 256, vllm_config()), pixels(0)
    assert all(requests.begin(one_image(number, data)) is not None for number in range(3))
    assert len(digested) == 1
    assert requests.begin(one_image(3, pixels(0))) is not None
    assert len(digested) == 2, "equal data in another object"


def test_what_is_remembered_of_images_is_bounded(monkeypatch):
    monkeypatch.setattr(items_module, "IDENTIFIERS_MAX", 2)
    requests = KeyMaker(ROOT, 256, vllm_config())
    assert all(requests.begin(one_image(0, pixels(number), f"image {number}")) is not None for number in range(4))
    assert len(requests._items._contents) == 2


# ---- adapters ----------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"lora" * 100)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "README.md").write_text("not read")
    return folder


def lora(path: Path | str, name: str = "sql", number: int = 1, *, again: bool = False) -> Any:
    return SimpleNamespace(
        lora_name=name, lora_int_id=number, lora_path=str(path), load_inplace=again, is_3d_lora_weight=False
    )


def lora_requests() -> KeyMaker:
    return KeyMaker(ROOT, 256, vllm_config(lora_config=SimpleNamespace(lora_dtype="bfloat16", target_modules=None)))


def test_an_adapter_counts_from_the_first_token_on(adapter):
    with_it, without = request(TOKENS, lora_request=lora(adapter)), request(TOKENS)
    assert shared(with_it, with_it) == 3
    assert shared(with_it, without) == 0


def test_other_files_at_the_same_path_are_another_adapter_in_the_next_engine(adapter):
    before = keys(request(TOKENS, lora_request=lora(adapter)), lora_requests())
    (adapter / "README.md").write_text("whatever")
    assert keys(request(TOKENS, lora_request=lora(adapter)), lora_requests()) == before
    (adapter / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 99}')
    changed = keys(request(TOKENS, lora_request=lora(adapter)), lora_requests())
    assert changed != before
    (adapter / "adapter_model.safetensors").write_bytes(b"LORA" * 100)
    assert keys(request(TOKENS, lora_request=lora(adapter)), lora_requests()) not in (before, changed)


def test_an_adapter_that_changes_while_it_is_used_is_not_cached_any_more(adapter, caplog):
    requests = lora_requests()
    before = keys(request(TOKENS, lora_request=lora(adapter)), requests)
    _rewrite(adapter / "adapter_model.safetensors", b"LORA" * 100)
    assert requests.begin(request(TOKENS, lora_request=lora(adapter))) is None
    assert "the files of adapter 'sql' have changed since kvtier identified them" in caplog.text
    after = keys(request(TOKENS, lora_request=lora(adapter, again=True)), requests)
    assert after != before
    assert keys(request(TOKENS, lora_request=lora(adapter)), requests) == after


def test_an_adapter_that_is_loaded_again_from_other_files_is_reported(adapter):
    """Requests that are running would go on with it, under the identity of the one before."""
    replaced = []
    config = vllm_config(lora_config=SimpleNamespace(lora_dtype="bfloat16", target_modules=None))
    requests = KeyMaker(ROOT, 256, config, replaced.append)
    requests.loaded(lora(adapter))
    requests.loaded(lora(adapter, again=True))
    keys(request(TOKENS, lora_request=lora(adapter, again=True)), requests)
    assert replaced == []
    _rewrite(adapter / "adapter_model.safetensors", b"LORA" * 100)
    requests.loaded(lora(adapter, again=True))
    assert replaced == ["sql"]
    _rewrite(adapter / "adapter_model.safetensors", b"Lora" * 100)
    keys(request(TOKENS, lora_request=lora(adapter, again=True)), requests)
    assert replaced == ["sql", "sql"]


def test_an_adapter_is_identified_when_vllm_loads_it(adapter):
    """Not when the first request comes: its files may be others by then."""
    requests = lora_requests()
    requests.loaded(lora(adapter))
    _rewrite(adapter / "adapter_model.safetensors", b"LORA" * 100)
    assert requests.begin(request(TOKENS, lora_request=lora(adapter))) is None
    requests.loaded(lora(adapter))
    assert requests.begin(request(TOKENS, lora_request=lora(adapter))) is None


def test_a_number_that_names_another_adapter_is_not_believed(adapter, tmp_path):
    requests = lora_requests()
    keys(request(TOKENS, lora_request=lora(adapter)), requests)
    other = tmp_path / "other"
    other.mkdir()
    for file in adapter.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert requests.begin(request(TOKENS, lora_request=lora(other))) is None
    assert requests.begin(request(TOKENS, lora_request=lora(other, number=2))) is not None


@pytest.mark.parametrize(
    ("breach", "problem"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "contains no adapter_config.json"),
        (lambda folder: folder.rename(folder.parent / "gone") and folder, "are not at"),
        (lambda folder: os.fspath(folder) + "x" * 300, "are not at"),
        (lambda folder: "~a-user-that-is-not-here/adapter", "are not at"),
    ],
)
def test_an_adapter_that_cannot_be_read_is_not_cached(adapter, breach, problem, caplog, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    place = breach(adapter) or adapter
    assert lora_requests().begin(request(TOKENS, lora_request=lora(place))) is None
    assert problem in caplog.text


def test_an_adapter_on_a_file_system_that_is_gone_is_not_cached(adapter, monkeypatch):
    requests = lora_requests()
    asked = request(TOKENS, lora_request=lora(adapter))
    before = keys(asked, requests)

    def stat(path: Path, **_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", stat)
        assert requests.begin(asked) is None
        assert lora_requests().begin(asked) is None
    assert keys(asked, requests) == before


def test_adapters_are_digested_once(adapter, monkeypatch):
    requests = lora_requests()
    keys(request(TOKENS, lora_request=lora(adapter)), requests)
    monkeypatch.setattr(module, "digest_files", None)
    keys(request(TOKENS, lora_request=lora(adapter)), requests)


def test_as_many_adapters_are_remembered_as_there_is_room_for(adapter, monkeypatch):
    monkeypatch.setattr(module, "ADAPTERS_MAX", 2)
    requests = lora_requests()
    for number in range(1, 5):
        keys(request(TOKENS, lora_request=lora(adapter, f"a{number}", number)), requests)
    assert len(requests.adapters._known) == 2


def test_reasons_are_told_once_and_not_without_end(monkeypatch, caplog):
    monkeypatch.setattr(module, "REASONS_MAX", 2)
    requests = KeyMaker(ROOT, 256, vllm_config())
    for path in ("/a", "/a", "/b", "/c"):
        assert requests.begin(request(TOKENS, lora_request=lora(path))) is None
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("field", "value"), [("pooling_params", object()), ("resumable", True), ("prompt_embeds", object())]
)
def test_requests_that_are_no_plain_prompts_are_not_cached(field, value):
    assert KeyMaker(ROOT, 256, vllm_config()).begin(request(TOKENS, **{field: value})) is None


def test_extras_of_one_kind_do_not_pass_for_another():
    salted = request(TOKENS, cache_salt="x")
    assert keys(salted) == chunk_keys(ROOT, TOKENS, 256, [Extra("salt", b"x")])
    assert keys(salted) != chunk_keys(ROOT, TOKENS, 256, [Extra("adapter", b"x")])


def _rewrite(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    later = time.time() + 5
    os.utime(file, (later, later))


# ---- control calls -------------------------------------------------------------------------------------------------


def test_a_chain_by_salt_and_adapter_is_that_of_a_request():
    requests = KeyMaker(ROOT, 256, vllm_config())
    for salt in ("", "one"):
        chain = requests.chain_of(salt, "")
        chain.extend(TOKENS)
        assert chain.prefix().keys == keys(request(TOKENS, cache_salt=salt or None), requests)
    with pytest.raises(module.NotCacheableError, match="no request has used an adapter named 'poet'"):
        requests.chain_of("", "poet")


@pytest.mark.parametrize(("loss", "salt"), [("int4", "exact:"), ("k8v4", "exact:one"), ("int4", "exact:\udc80")])
def test_with_a_lossy_class_a_salt_can_demand_exact_kv(caplog, loss, salt):
    """Then kvtier has no name for the request's KV. In an exact engine the salt is one like any other."""
    lossy, asked = KeyMaker(ROOT, 256, vllm_config(), loss=loss), request(TOKENS, cache_salt=salt)
    assert lossy.begin(asked) is None
    assert lossy.extras(asked) is None, "nor has it below vLLM's own tiering"
    with pytest.raises(module.NotCacheableError, match=f"stores KV with loss .{loss}"):
        lossy.chain_of(salt, "")
    (told,) = caplog.messages
    assert told.startswith("request r is not cached: its cache_salt begins with 'exact:', and this engine")
    assert keys(asked) == chunk_keys(ROOT, TOKENS, 256, [Extra("salt", salt.encode("utf-8", "surrogatepass"))])


@pytest.mark.parametrize("salt", ["", "exact", "Exact:", " exact:", "one:exact:"])
def test_with_a_lossy_class_other_salts_change_nothing_and_neither_do_hints(salt):
    lossy = KeyMaker(ROOT, 256, vllm_config(), loss="int4")
    hinted = request(TOKENS, cache_salt=salt or None, kv_transfer_params={"cache_salt": "exact:", "loss": "none"})
    assert keys(hinted, lossy) == keys(request(TOKENS, cache_salt=salt or None))


def test_clearing_a_salt_separates_its_later_requests_and_no_others():
    requests = KeyMaker(ROOT, 256, vllm_config())
    asked = {salt: request(TOKENS, cache_salt=salt) for salt in ("one", "two", None)}
    before = {salt: keys(it, requests) for salt, it in asked.items()}
    assert requests.clear_salt("one")
    after = {salt: keys(it, requests) for salt, it in asked.items()}
    assert [salt for salt in asked if set(before[salt]) & set(after[salt])] == ["two", None]
    assert requests.clear_salt("")
    again = {salt: keys(it, requests) for salt, it in asked.items()}
    assert [salt for salt in asked if again[salt] == after[salt]] == ["one", "two"]
    requests.new_epoch()
    new = {salt: keys(it, requests) for salt, it in asked.items()}
    seen = [*before.values(), *after.values(), *again.values()]
    assert not [salt for salt in asked if any(set(new[salt]) & set(it) for it in seen)]


def test_salts_that_were_cleared_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "CLEARED_SALTS_MAX", 2)
    requests = KeyMaker(ROOT, 256, vllm_config())
    assert [requests.clear_salt(salt) for salt in "abcab"] == [True, True, False, True, True]
    requests.new_epoch()
    assert requests.clear_salt("c")


def test_a_reset_is_never_undone_by_clearing_at_the_same_moment(monkeypatch):
    """A lost reset would find KV of earlier weights."""
    requests = KeyMaker(ROOT, 256, vllm_config())
    before = keys(request(TOKENS), requests)
    inner, thread = module.secrets.token_bytes, threading.Thread(target=requests.new_epoch)

    def slowly(size: int) -> bytes:
        if threading.current_thread() is not thread:
            thread.start()
            thread.join(0.2)
        return inner(size)

    monkeypatch.setattr(module.secrets, "token_bytes", slowly)
    requests.clear_salt("one")
    thread.join()
    assert not set(before) & set(keys(request(TOKENS), requests))


def reads(*numbered, adapter):
    """What workers report that have read the adapter's files as they are now, or while they changed."""
    return [AdapterRead(number, {} if is_torn else adapter_versions(str(adapter))) for number, is_torn in numbered]


def test_an_adapter_of_which_vllm_reads_other_files_is_not_cached_until_it_reads_the_identified_ones(adapter):
    requests = lora_requests()
    weights = adapter / "adapter_model.safetensors"
    right, asked = weights.read_bytes(), request(TOKENS, lora_request=lora(adapter))
    before = keys(asked, requests)
    _rewrite(weights, b"LORA" * 100)
    assert requests.adapters.read(reads((1, False), adapter=adapter)) == {1}
    _rewrite(weights, right)
    assert requests.begin(asked) is None, "vLLM still holds the other one"
    assert requests.adapters.read(reads((1, False), adapter=adapter)) == set()
    assert keys(asked, requests) == before


def test_workers_that_read_different_files_are_a_doubt_as_are_files_that_change_during_a_read(adapter):
    requests = lora_requests()
    asked = request(TOKENS, lora_request=lora(adapter))
    keys(asked, requests)
    good, torn = (1, False), (1, True)
    for found, doubted in (([good, good], set()), ([good, torn], {1}), ([torn], {1}), ([good], set())):
        assert requests.adapters.read(reads(*found, adapter=adapter)) == doubted
        assert (requests.begin(asked) is None) == bool(doubted)


def test_an_adapter_that_vllm_has_read_before_it_was_identified_must_be_the_same(adapter):
    requests = lora_requests()
    assert requests.adapters.read(reads((1, False), (2, False), adapter=adapter)) == set()
    assert requests.begin(request(TOKENS, lora_request=lora(adapter))) is not None
    _rewrite(adapter / "adapter_model.safetensors", b"LORA" * 100)
    assert requests.begin(request(TOKENS, lora_request=lora(adapter, number=2))) is None
    assert requests.adapters.mixed == {2}, "vLLM's own cache has blocks of the files before"


def test_an_adapter_that_vllm_reads_again_from_other_files_before_it_is_identified_is_a_doubt(adapter):
    adapters = lora_requests().adapters
    assert adapters.read(reads((1, False), adapter=adapter)) == set()
    _rewrite(adapter / "adapter_model.safetensors", b"LORA" * 100)
    assert adapters.read(reads((1, False), adapter=adapter)) == {1}
    assert adapters.read(reads((1, False), adapter=adapter)) == set()


def test_the_same_content_in_other_files_is_the_same_adapter(adapter, monkeypatch):
    requests = lora_requests()
    asked = request(TOKENS, lora_request=lora(adapter))
    before = keys(asked, requests)
    requests.adapters.read(reads((1, False), adapter=adapter))
    _rewrite(adapter / "adapter_model.safetensors", (adapter / "adapter_model.safetensors").read_bytes())
    assert keys(asked, requests) == before
    assert len(requests.adapters.named(1)) == 2
    _rewrite(adapter / "adapter_model.safetensors", b"LORA" * 100)
    assert requests.begin(asked) is None
    monkeypatch.setattr(module, "digest_files", None)
    assert requests.begin(asked) is None, "other content is digested once"
