"""The journal's lines add up to the metrics, name no content, and never delay or fail what they are about."""

import json
import re
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests.metric_values import values_of
from tests.rig import (
    CHUNK_TOKENS,
    FINGERPRINT,
    LAYOUT,
    Engine,
    config,
    load_places,
    loaded,
    looked_up,
    places_of,
    prefix_of,
    stored,
)

from kvtier.config.loader import load
from kvtier.config.sections import Config, HostConfig, JournalConfig
from kvtier.connect.vllm.requests.account import RequestAccount, client_id, client_id_of_engine
from kvtier.core.planner import Piece, Planner
from kvtier.keys.secret import Secret
from kvtier.layout import GroupLayout, History, KvLayout, engine_bytes, largest, of_all_ranks
from kvtier.observe import metric_definitions as table
from kvtier.observe.metrics import Metrics
from kvtier.runtime.executor import Completion
from kvtier.runtime.observers import journal as journals
from kvtier.runtime.observers import line_file
from kvtier.runtime.observers.journal import Journal, Planned
from kvtier.runtime.open import open_session
from kvtier.runtime.open_object_store import open_object_store
from kvtier.tier.disk.kind import DiskSettings
from kvtier.types import (
    Direction,
    LoadDone,
    LoadOption,
    Lookup,
    ObjectBytes,
    ObjectId,
    Outcome,
    Presence,
    RequestId,
    Transfer,
)

MIB = 1 << 20
CHUNKS = 6
ROOT = bytes(range(32))
PAYLOADS = [sum(group.layer_bytes) for group in LAYOUT.groups]


def settings(tmp_path: Path, **more) -> Config:
    """Host memory of a few chunks, a disk tier, and a journal."""
    disk = DiskSettings(path=tmp_path / "disk", capacity_bytes=8 * MIB, reserve_bytes=1)
    made = replace(config(None), tiers=(disk,), journal=JournalConfig(path=tmp_path / "journal"))
    return replace(made, **more)


def lines_of(folder: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()]
    assert [line["version"] for line in lines if line["kind"] == "journal"] == [journals.VERSION] * len(
        list(folder.iterdir())
    )
    return [line for line in lines if line["kind"] == kind]


def lost(metrics: Metrics) -> float:
    return metrics.get(table.JOURNAL_LINES, result="lost")


def served(kv, seeds) -> None:
    """Store a prompt for each seed, then load each again; host memory holds a few of them."""
    for round_number in range(2):
        for seed in seeds:
            name, prefix = f"{round_number}.{seed}", prefix_of(CHUNKS, kv.root, seed=seed)
            tokens = looked_up(kv.session, name, prefix).tokens
            if tokens:
                loaded(kv.session, name, prefix, tokens, load_places(tokens))
            stored(kv.session, f"{name} store", prefix, places_of(range(CHUNKS)))
            kv.session.release(RequestId(name))


def transfer(number: int, direction: Direction = Direction.DEMOTE, tier: str = "disk", group: int = 0) -> Completion:
    key = number.to_bytes(32)
    command = Transfer(number, direction, key, group, 0, tier, None, (), None, 0, 1e9, None)
    return Completion(command, Outcome.DONE, size_bytes=4096, seconds=0.5)


def journalled(folder: Path, *completions: Completion, bytes_max: int = MIB) -> Metrics:
    """A journal gets `completions` and is closed."""
    metrics = Metrics()
    journal = Journal(folder, bytes_max, [LAYOUT], ROOT, metrics)
    for completion in completions:
        journal.completed(completion)
    journal.close(60)
    return metrics


def test_the_lines_of_a_session_add_up_to_its_metrics(tmp_path):
    kv = open_session(settings(tmp_path), LAYOUT, FINGERPRINT, Engine(64).copier())
    served(kv, range(12))
    kv.session.close(60)
    lines = lines_of(tmp_path / "journal", "object")
    links = {"read": "promote", "write": "demote"}
    for way, link in links.items():
        of_way = [line for line in lines if line["way"] == way]
        assert of_way
        assert sum(line["bytes"] for line in of_way) == kv.metrics.get(table.TRANSFER_BYTES, link=link, tier="disk")
        outcomes = Counter(line["outcome"] for line in of_way)
        assert outcomes == {
            it.value: count for it in Outcome if (count := kv.metrics.get(table.TRANSFERS, link=link, outcome=it.value))
        }
        seconds = values_of(kv.metrics)[f'kvtier_transfer_seconds_sum{{link="{link}",tier="disk"}}']
        assert sum(line["seconds"] for line in of_way if line["outcome"] == "done") == pytest.approx(seconds)
    done = [line for line in lines if line["outcome"] == "done"]
    assert all(line["payload_bytes"] == PAYLOADS[line["group"]] < line["bytes"] for line in done)
    assert kv.metrics.get(table.JOURNAL_LINES, result="recorded") == len(lines)
    assert lost(kv.metrics) == 0
    # Each object that was read had been written, under the same name.
    names = {way: {line["name"] for line in done if line["way"] == way} for way in links}
    assert names["read"] <= names["write"]
    assert len(names["write"]) == 12 * CHUNKS * len(LAYOUT.groups)


def test_an_objects_name_is_the_same_after_a_restart_and_another_in_another_store(tmp_path):
    names = []
    for secret in (b"1", b"1", b"2"):
        folder = tmp_path / str(len(names))
        made = settings(tmp_path, journal=JournalConfig(path=folder))
        made = replace(made, store=replace(made.store, secret=Secret(secret * 32)))
        made = replace(made, tiers=(replace(made.tiers[0], path=folder / "disk"),))
        kv = open_session(made, LAYOUT, FINGERPRINT, Engine(64).copier())
        stored(kv.session, "r", prefix_of(CHUNKS, kv.root), places_of(range(CHUNKS)))
        kv.session.close(60)
        (file,) = folder.glob("journal-*")
        assert file.stat().st_mode & 0o777 == 0o600
        text = file.read_text()
        names.append({json.loads(line)["name"] for line in text.splitlines()[1:]})
        for key in prefix_of(CHUNKS, kv.root).keys:  # a name that were the key's own bytes would be found here
            assert key[: journals.NAME_BYTES].hex() not in text
    assert names[0] == names[1]
    assert len(names[0]) == CHUNKS * len(LAYOUT.groups)
    assert not names[0] & names[2]


def test_an_object_store_writes_lines_too_with_names_of_its_own(tmp_path):
    objects = [
        ObjectBytes(ObjectId(bytes([number]) * 32), [bytearray(size) for size in LAYOUT.groups[0].layer_bytes])
        for number in range(9)
    ]
    names = []
    for folder in (
        tmp_path / "1",
        tmp_path / "2",
    ):  # the engine's keys are no secret; each store has one
        store = open_object_store(settings(folder, host=HostConfig(staging_bytes=MIB)), LAYOUT, FINGERPRINT)
        assert set(store.put_from(objects, 60)) == {Outcome.DONE}
        assert set(store.get_into(objects, 60)) == {Outcome.DONE}
        store.close(60)
        lines = lines_of(folder / "journal", "object")
        for way, link in (("read", "promote"), ("write", "demote")):
            moved = sum(line["bytes"] for line in lines if line["way"] == way)
            assert moved == store.metrics.get(table.TRANSFER_BYTES, link=link, tier="disk") > 0
        names.append(Counter(line["name"] for line in lines))
        assert list(names[-1].values()) == [2] * len(objects)  # each one written and read
    assert not names[0].keys() & names[1].keys()


def test_deciding_threads_do_not_wait_for_a_hanging_file_system(tmp_path, monkeypatch):
    hangs, may_go_on = threading.Event(), threading.Event()
    write = line_file.os.write

    def hanging(file, data):
        hangs.set()
        assert may_go_on.wait(60)
        return write(file, data)

    monkeypatch.setattr(line_file.os, "write", hanging)
    metrics = Metrics()
    journal = Journal(tmp_path, MIB << 4, [LAYOUT], ROOT, metrics)
    journal.completed(transfer(0))
    assert hangs.wait(60)
    for number in range(1, journals.WAITING_MAX + 51):
        journal.completed(transfer(number))
    assert lost(metrics) == 50
    journal.close(0.1)  # returns although the thread hangs
    may_go_on.set()
    journal.close(60)
    assert len(lines_of(tmp_path, "object")) == journals.WAITING_MAX + 1
    assert metrics.get(table.JOURNAL_LINES, result="recorded") == journals.WAITING_MAX + 1


def test_a_full_journal_counts_its_lost_lines_and_a_second_one_counts_the_first(tmp_path):
    kept = []
    for _ in range(2):
        metrics = journalled(tmp_path, *map(transfer, range(100)), bytes_max=4096)
        kept.append(metrics.get(table.JOURNAL_LINES, result="recorded"))
        assert lost(metrics) == 100 - kept[-1]
        assert 3800 < sum(file.stat().st_size for file in tmp_path.iterdir()) <= 4096
    assert kept[0] > 10
    assert kept[1] < 2


def test_a_journal_that_vanishes_while_sizes_are_summed_up_is_no_error(tmp_path):
    (tmp_path / "journal-1.jsonl").symlink_to("nothing")
    (tmp_path / "journal-2.jsonl").write_bytes(bytes(4000))
    assert lost(journalled(tmp_path, transfer(1), bytes_max=4096)) == 1, "the other one counts"


def test_the_choice_that_counts_is_the_last_before_the_request_began():
    planner = Planner()
    for tokens in (100, 1000, 2000, 4000):
        planner.prefilled([Piece(tokens, 0)], tokens * 1e-3)
    options = [LoadOption(tokens, place, 0.01, 0.001, True) for tokens, place in ((300, "host"), (900, "disk"))]
    lookup = Lookup(900, 300, Presence.ARRIVING, (("host", 300), ("disk", 600)), tuple(options))
    account = RequestAccount()
    account.resident(0)
    plan = planner.plan(lookup, 1000, now_s=0.0)
    account.chosen(lookup, plan, planner)
    assert account.planned == Planned(
        900,
        pytest.approx(0.11, rel=0.01),
        pytest.approx(1.0, rel=0.01),
        pytest.approx(0.71, rel=0.01),
        0.0,
        "disk",
        False,
    )
    known = replace(account)
    account.load_begins(900)
    account.resident(512)  # after a preemption
    account.chosen(Lookup(0, 0, Presence.ABSENT), plan, planner)
    assert (account.resident_tokens, account.found, account.planned) == (0, lookup.sources, known.planned)
    done = LoadDone(RequestId("r"), 2 * CHUNK_TOKENS, 900, ((0, 2), (1, 2)), (("disk", 2 * CHUNK_TOKENS),))
    account.load_ended(done, 0.5, places_of(range(3)), of_all_ranks([LAYOUT] * 2, engine_bytes))
    assert account.loaded_bytes == 2 * 2 * sum(PAYLOADS)
    assert account.loaded == {"disk": 2 * CHUNK_TOKENS}


def test_an_item_without_a_line_costs_only_itself(tmp_path, caplog):
    metrics = journalled(tmp_path, *(transfer(1, group=group) for group in (0, len(PAYLOADS), len(PAYLOADS), 1)))
    assert [line["group"] for line in lines_of(tmp_path, "object")] == [0, 1]
    assert lost(metrics) == 2
    assert caplog.text.count("internal error") == 1


def test_other_commands_have_no_line(tmp_path):
    journalled(tmp_path, transfer(1, Direction.SCATTER, tier=""), transfer(2, Direction.PROMOTE))
    assert [line["way"] for line in lines_of(tmp_path, "object")] == ["read"]


def test_it_is_off_unless_a_directory_is_set(tmp_path, caplog):
    assert load(environ={}).config.journal.path is None
    kv = open_session(config(tmp_path / "kv"), LAYOUT, FINGERPRINT, Engine(64).copier())
    assert kv.journal is None
    kv.session.close(60)
    (tmp_path / "file").write_text("")
    wrong = settings(tmp_path, journal=JournalConfig(path=tmp_path / "file" / "below"))
    kv = open_session(wrong, LAYOUT, FINGERPRINT, Engine(64).copier())
    kv.session.close(60)
    assert kv.journal is None
    (error,) = [it.getMessage() for it in caplog.records if it.levelname == "ERROR"]
    assert re.search(r"journal\.path = .*no file can be created: .*; kvtier starts without this feature", error)


@pytest.mark.parametrize(
    ("sent", "known", "as_client"),
    [
        (client_id, "chatcmpl-abc", "abc"),
        (client_id, "cmpl-abc-0", "abc"),
        (client_id, "cmpl-abc-0-1", "abc-0"),
        (client_id, "3_chatcmpl-abc", "abc"),
        (client_id, "plain-0", "plain-0"),
        (client_id_of_engine, "chatcmpl-abc-0a1b2c3d-99887766", "abc-0a1b2c3d"),
        (client_id_of_engine, "cmpl-abc-0-99887766", "abc"),
    ],
)
def test_ids_lose_what_vllm_adds_and_nothing_else(sent, known, as_client):
    assert sent(known) == as_client


def test_ranks_with_other_layers_add_up_their_own_bytes(tmp_path):
    metrics = Metrics()
    stages = [KvLayout(CHUNK_TOKENS, (GroupLayout(History(), (1000,) * count, "p"),)) for count in (3, 1)]
    journal = Journal(tmp_path, MIB, stages, ROOT, metrics)
    journal.completed(transfer(0))
    journal.close(60)
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text("utf-8").splitlines()[1])["payload_bytes"] == 4000
    assert largest(stages) == stages[0]
