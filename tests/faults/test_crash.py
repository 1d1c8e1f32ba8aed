"""A process that stores through the whole path is killed at random moments; what it leaves is never wrong bytes."""

import gc
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.rig import CHUNK_TOKENS, LAYOUT, Engine, load_places, loaded, looked_up, opened, places_of, prefix_of, stored
from tests.system import in_child, until

from kvtier.keys.object_names import object_name
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.files.ledger import read_ledger
from kvtier.tier.files.store_lock import is_locked

CHUNKS = 30

WRITER = """
import sys
from pathlib import Path
from tests.rig import *
engine = Engine(200, seed=7)
kv = opened(Path(sys.argv[1]), engine)
number = 0
while True:
    prefix = prefix_of(30, kv.root, seed=number % 5)
    done = stored(kv.session, f"s{number}", prefix, places_of(range(30)))
    print(f"stored {number % 5} {done.stored}", flush=True)
    number += 1
"""


def _killed_after(path: Path, seconds: float) -> set[int]:
    """Run a writer, kill it after `seconds`; returns the seeds of the prefixes that it acknowledged."""
    top = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=top,
        env={**os.environ, "PYTHONPATH": f"{top}{os.pathsep}{top / 'src'}"},
    )
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        assert first.startswith("stored"), "the writer did not start"
        time.sleep(seconds)
    finally:
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
        process.stdout.close()
        process.wait(10)
    return {int(line.split()[1]) for line in (first + rest).splitlines()}


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [3, pytest.param(12, marks=pytest.mark.nightly)])
def test_after_a_kill_at_any_moment_what_is_found_is_right(tmp_path, rounds):
    draw = random.Random(5)
    source = Engine(200, seed=7)
    found_anything = False
    for number in range(rounds + 6):
        if found_anything and number >= rounds:
            break
        later = 4.0 ** max(0, number - rounds + 1)  # a busy machine may have written nothing in the first rounds
        _killed_after(tmp_path / "kv", draw.random() * 0.05 * later)
        target = Engine(200, seed=8)
        kv = opened(tmp_path / "kv", target)
        for seed in range(5):
            prefix = prefix_of(CHUNKS, kv.root, seed=seed)
            answer = looked_up(kv.session, f"r{seed}", prefix)
            if not answer.tokens:
                continue
            done = loaded(kv.session, f"r{seed}", prefix, answer.tokens, load_places(answer.tokens))
            assert done.tokens == answer.tokens, "a published object was not whole"
            assert target.same(source, load_places(done.tokens))
            found_anything = True
        assert kv.session.close().flushed
        objects = [file for file in (tmp_path / "kv" / "objects").rglob("*") if file.is_file()]
        assert read_ledger(str(tmp_path / "kv" / "ledger")) == sum(
            -(-file.stat().st_size // 4096) * 4096 for file in objects
        )
    assert found_anything


def test_one_flipped_bit_on_disk_is_a_miss_that_heals(tmp_path):
    source = Engine(200, seed=1)
    first = opened(tmp_path / "kv", source)
    prefix = prefix_of(6, first.root)
    tokens = 6 * CHUNK_TOKENS
    stored(first.session, "a", prefix, places_of(range(6)))
    first.session.close()
    name = object_name(prefix.keys[3], 0, LAYOUT.part(0), LAYOUT.digest(0)).hex()
    (file,) = (tmp_path / "kv" / "objects").rglob(name)
    data = bytearray(file.read_bytes())
    data[5000] ^= 4
    file.write_bytes(data)

    second = opened(tmp_path / "kv", Engine(200, seed=2))
    assert looked_up(second.session, "b", prefix).tokens == tokens
    done = loaded(second.session, "b", prefix, tokens, load_places(tokens))
    # The window's chunks before the hole were not asked for, so nothing before it is restorable either.
    assert (done.tokens, (0, 3) in done.failed) == (0, True)
    until(lambda: not file.exists())
    stored(second.session, "c", prefix, places_of(range(6)))
    second.session.close()
    assert file.exists()

    target = Engine(200, seed=3)
    third = opened(tmp_path / "kv", target)
    assert looked_up(third.session, "d", prefix).tokens == tokens
    assert loaded(third.session, "d", prefix, tokens, load_places(tokens)).tokens == tokens
    third.session.close()


def test_a_forked_child_of_an_engine_ends_without_a_trace(tmp_path):
    """As a worker that a server forks: it closes what it inherited, and the engine goes on."""
    source, target = Engine(200, seed=7), Engine(200, seed=8)
    kv = opened(tmp_path / "kv", source)
    prefix = prefix_of(CHUNKS, kv.root)
    assert stored(kv.session, "s", prefix, places_of(range(CHUNKS))).stored

    def act() -> int:
        # Not isinstance: some objects of PyTorch's warn when it looks at them. Earlier tests leave tiers, too.
        found = [it for it in gc.get_objects() if type(it) is DirectoryTier]
        tiers = [it for it in found if getattr(it, "root", None) == tmp_path / "kv"]
        for tier in tiers:  # as a finalizer may
            tier.close()
        kv.session.close(1.0)
        return len(tiers)

    assert in_child(act) == 1
    assert is_locked(str(tmp_path / "kv" / "kvtier-store.json"))
    assert not (tmp_path / "kv" / "index").exists()
    assert stored(kv.session, "t", prefix_of(CHUNKS, kv.root, seed=1), places_of(range(CHUNKS))).stored
    assert kv.session.close().flushed
    kv = opened(tmp_path / "kv", target)
    found = looked_up(kv.session, "l", prefix)
    assert loaded(kv.session, "l", prefix, found.tokens, load_places(found.tokens)).tokens == CHUNKS * CHUNK_TOKENS
    assert target.same(source, load_places(found.tokens))
    kv.session.close()
