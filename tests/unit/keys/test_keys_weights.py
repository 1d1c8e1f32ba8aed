"""Digests of weights: content and names count, places and order do not, and a cache never makes them wrong."""

import gc
import json
import os
import stat
import time
import weakref

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.keys import weights
from kvtier.keys.weights import (
    PIECE_BYTES,
    changed_file,
    checkpoint_files,
    digest_files,
    digest_tensors,
    file_versions,
    home_cache,
)


@pytest.fixture
def checkpoint(tmp_path):
    """Two files in two directories, one of more than two pieces."""
    place = tmp_path / "checkpoint"
    (place / "sub").mkdir(parents=True)
    (place / "a.safetensors").write_bytes(np.arange(PIECE_BYTES // 4 + 100, dtype=np.uint64).tobytes())
    (place / "sub" / "b.bin").write_bytes(b"bias")
    return place


def files_of(place):
    return [place / "a.safetensors", place / "sub" / "b.bin"]


def test_a_checkpoint_that_moves_keeps_its_digest(checkpoint, tmp_path):
    before = digest_files(files_of(checkpoint))
    checkpoint.rename(tmp_path / "moved")
    after = digest_files(files_of(tmp_path / "moved")[::-1])
    assert after.digest == before.digest
    assert before.total_bytes == before.hashed_bytes == 2 * PIECE_BYTES + 800 + 4
    assert before.seconds > 0


@pytest.mark.parametrize("position", [0, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES + 799])
def test_every_byte_enters_the_digest(checkpoint, position):
    before = digest_files(files_of(checkpoint)).digest
    content = bytearray((checkpoint / "a.safetensors").read_bytes())
    content[position] ^= 1
    (checkpoint / "a.safetensors").write_bytes(content)
    assert digest_files(files_of(checkpoint)).digest != before


def test_names_and_the_set_of_files_enter_the_digest(checkpoint):
    before = digest_files(files_of(checkpoint)).digest
    (checkpoint / "empty.bin").touch()
    assert digest_files([*files_of(checkpoint), checkpoint / "empty.bin"]).digest != before
    (checkpoint / "sub" / "b.bin").rename(checkpoint / "sub" / "c.bin")
    assert digest_files([checkpoint / "a.safetensors", checkpoint / "sub" / "c.bin"]).digest != before


def test_a_name_that_is_no_text_is_fine(tmp_path):
    odd = tmp_path / os.fsdecode(b"\xff.bin")
    odd.write_bytes(b"1")
    assert len(digest_files([odd]).digest) == 32


def test_files_behind_links_count_under_the_links_name(checkpoint, tmp_path):
    linked = tmp_path / "linked"
    (linked / "sub").mkdir(parents=True)
    (linked / "a.safetensors").symlink_to(checkpoint / "a.safetensors")
    (linked / "sub" / "b.bin").symlink_to(checkpoint / "sub" / "b.bin")
    assert digest_files(files_of(linked)).digest == digest_files(files_of(checkpoint)).digest


def test_the_cache_spares_the_reading(checkpoint, tmp_path):
    cache = tmp_path / "cache.json"
    first = digest_files(files_of(checkpoint), cache, stable_s=0)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o600
    second = digest_files(files_of(checkpoint), cache, stable_s=0)
    assert second.digest == first.digest == digest_files(files_of(checkpoint)).digest
    assert (first.hashed_bytes, second.hashed_bytes, second.total_bytes) == (first.total_bytes, 0, first.total_bytes)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["cache.json", "checkpoint"]


def test_the_cache_is_believed_only_for_the_same_version_of_a_file(checkpoint, tmp_path):
    cache = tmp_path / "cache.json"
    before = digest_files(files_of(checkpoint), cache, stable_s=0)
    about = (checkpoint / "a.safetensors").stat()
    content = bytearray((checkpoint / "a.safetensors").read_bytes())
    content[5] ^= 1
    (checkpoint / "a.safetensors").write_bytes(content)
    # Size and mtime can be restored, ctime cannot.
    os.utime(checkpoint / "a.safetensors", ns=(about.st_atime_ns, about.st_mtime_ns))
    after = digest_files(files_of(checkpoint), cache, stable_s=0)
    assert after.digest != before.digest
    assert after.hashed_bytes == about.st_size


def test_a_file_that_changed_just_now_is_not_entered(checkpoint, tmp_path):
    cache = tmp_path / "cache.json"
    digest_files(files_of(checkpoint), cache, stable_s=3600)
    assert json.loads(cache.read_text())["digests"] == {}
    assert digest_files(files_of(checkpoint), cache, stable_s=3600).hashed_bytes > 0


LABEL = "1:2:3:4:5"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"version": 2, "digests": {}}',
        b'{"version": 1}',
        b'{"version": 1, "digests": []}',
        json.dumps({"version": 1, "digests": {LABEL: "00"}}).encode(),
        json.dumps({"version": 1, "digests": {LABEL: 7}}).encode(),
        json.dumps({"version": 1, "digests": {LABEL: "zz" * 32}}).encode(),
        json.dumps({"version": 1, "digests": {"1:2:3": "00" * 32}}).encode(),
        json.dumps({"version": 1, "digests": {"1:2:3:4:x": "00" * 32}}).encode(),
        b"[" * 100_000,
        b" " * (weights.CACHE_BYTES_MAX + 1),
    ],
)
def test_a_damaged_cache_is_ignored_and_made_anew(checkpoint, tmp_path, text, caplog):
    cache = tmp_path / "cache.json"
    cache.write_bytes(text)
    cache.chmod(0o600)
    wanted = digest_files(files_of(checkpoint)).digest
    first = digest_files(files_of(checkpoint), cache, stable_s=0)
    assert "is ignored" in caplog.text
    assert (first.digest, first.hashed_bytes) == (wanted, first.total_bytes)
    assert digest_files(files_of(checkpoint), cache, stable_s=0).hashed_bytes == 0


def test_a_cache_that_others_may_have_written_is_ignored(checkpoint, tmp_path, caplog):
    cache = tmp_path / "cache.json"
    digest_files(files_of(checkpoint), cache, stable_s=0)
    cache.chmod(0o620)
    assert digest_files(files_of(checkpoint), cache, stable_s=0).hashed_bytes > 0
    assert "other users can write to it" in caplog.text
    assert stat.S_IMODE(cache.stat().st_mode) == 0o600


def test_a_cache_that_cannot_be_written_costs_only_time(checkpoint, tmp_path, caplog):
    wanted = digest_files(files_of(checkpoint)).digest
    assert digest_files(files_of(checkpoint), tmp_path / "missing" / "cache.json").digest == wanted
    assert "cannot be written" in caplog.text
    (tmp_path / "directory").mkdir()
    assert digest_files(files_of(checkpoint), tmp_path / "directory").digest == wanted
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint", "directory"]


def test_the_cache_lies_below_the_home_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    place = home_cache()
    assert place is not None
    assert place.parent.is_relative_to(tmp_path)
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert home_cache() is None


def test_the_cache_keeps_the_newest_entries_only(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "CACHE_ENTRIES_MAX", 2)
    cache = tmp_path / "cache.json"
    for name in "abc":
        (tmp_path / name).write_text(name)
        digest_files([tmp_path / name], cache, stable_s=0)
    hashed = [digest_files([tmp_path / name], cache, stable_s=0).hashed_bytes for name in "bca"]
    assert hashed == [0, 0, 1]


def test_files_that_are_missing_or_no_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="no weights files were given"):
        digest_files([])
    with pytest.raises(ConfigError, match=r"missing.bin cannot be read: No such file"):
        digest_files([tmp_path / "missing.bin"])
    (tmp_path / "a.bin").write_bytes(b"1")
    with pytest.raises(ConfigError, match="given twice"):
        digest_files([tmp_path / "a.bin", tmp_path / "a.bin"])
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        digest_files([tmp_path])


@pytest.fixture
def after_each_piece(monkeypatch):
    """Makes the reader of a file call a function after each piece."""

    def calls(act):
        reader_of = weights._reader_of_file

        def reader(path):
            inner = reader_of(path)

            def piece(offset, length):
                digest = inner(offset, length)
                act()
                return digest

            return piece

        monkeypatch.setattr(weights, "_reader_of_file", reader)

    return calls


@pytest.mark.parametrize(
    ("before_bytes", "after_bytes"),
    [(2 * PIECE_BYTES + 1, 2 * PIECE_BYTES + 2), (64 * PIECE_BYTES, 5)],  # more pieces than are in flight at once
    ids=["grows", "is cut"],
)
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, after_each_piece, before_bytes, after_bytes):
    path = tmp_path / "a.bin"
    path.touch()
    os.truncate(path, before_bytes)
    after_each_piece(lambda: os.truncate(path, after_bytes))
    with pytest.raises(ConfigError, match=r"a.bin changed while it was being read"):
        digest_files([path])


def test_tensors_count_by_name_dtype_shape_and_content():
    base = [("a", "float32", (2, 2), bytes(16)), ("b", "int8", (3,), b"\1\2\3")]
    digest = digest_tensors(base).digest
    changed = [
        ("c", "float32", (2, 2), bytes(16)),
        ("a", "int32", (2, 2), bytes(16)),
        ("a", "float32", (4,), bytes(16)),
        ("a", "float32", (2, 2), bytes(15) + b"\1"),
    ]
    assert len({digest_tensors([one, base[1]]).digest for one in changed} | {digest}) == 5
    assert digest_tensors(base[:1]).digest != digest
    assert digest_tensors(base[::-1]).digest == digest


def test_tensors_may_come_from_a_generator_and_in_any_buffer():
    matrix = np.arange(PIECE_BYTES // 4 + 6, dtype=np.float64).reshape(-1, 2)
    one = digest_tensors((name, "float64", matrix.shape, memoryview(matrix)) for name in ("a", "b"))
    two = digest_tensors([(name, "float64", matrix.shape, matrix.tobytes()) for name in ("b", "a")])
    assert one.digest == two.digest
    assert one.total_bytes == one.hashed_bytes == 2 * matrix.nbytes
    assert digest_tensors([("e", "float32", (0, 2), memoryview(np.empty((0, 2))))]).total_bytes == 0


def test_impossible_tensors_are_refused():
    with pytest.raises(ConfigError, match="no weights were given"):
        digest_tensors([])
    with pytest.raises(ConfigError, match="two weights have the name 'a'"):
        digest_tensors([("a", "int8", (1,), b"1"), ("a", "int8", (1,), b"2")])
    with pytest.raises(ValueError, match="tensor 'a': its bytes must be contiguous"):
        digest_tensors([("a", "int8", (2,), memoryview(b"1234")[::2])])


def test_the_weight_files_of_a_checkpoint_are_found(tmp_path):
    for name in ("b.safetensors", "a.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "x.pt"):
        (tmp_path / name).touch()
    for name in ("config.json", "tokenizer.json", "training_args.bin", "optimizer.pt", "README.md"):
        (tmp_path / name).touch()
    (tmp_path / "directory.bin").mkdir()
    assert [file.name for file in checkpoint_files(tmp_path)] == [
        "a.safetensors",
        "b.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "x.pt",
    ]
    assert checkpoint_files(str(tmp_path / "x.pt")) == [tmp_path / "x.pt"]


def test_a_checkpoint_that_is_missing_or_empty_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing cannot be read: No such file"):
        checkpoint_files(tmp_path / "missing")
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigError, match=r"contains no weights; kvtier looked for \*.safetensors"):
        checkpoint_files(tmp_path)


@pytest.fixture
def small_heap():
    """Objects of other tests are not looked at again each time the garbage is collected."""
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("small_heap")
def test_a_tensors_bytes_are_let_go_once_they_are_hashed():
    alive = []

    def tensors():
        for number in range(64):
            gc.collect()
            # What is in flight, two pieces for each thread, and the one that was given last.
            assert sum(content() is not None for content in alive) <= 2 * len(os.sched_getaffinity(0)) + 2
            content = np.full(1000, number, np.uint8)
            alive.append(weakref.ref(content))
            yield (f"layer {number}", "uint8", content.shape, content)

    digest_tensors(tensors())


TICK_S = 0.02
"""File systems take their times from a clock that older kernels advance every 4 to 10 ms."""


def replaced(path):
    (path.parent / "new").write_bytes(path.read_bytes())
    os.replace(path.parent / "new", path)


def rewritten(path):
    """Other bytes in the same file, with the time of the old ones."""
    about = path.stat()
    path.write_bytes(bytes(about.st_size))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def repointed(path):
    """Turn the file into a link to a copy, as hub caches have them."""
    blob = path.rename(path.parent / "blob")
    (path.parent / "other").write_bytes(blob.read_bytes())
    path.symlink_to("other")


def restored(path):
    """Another file and then the first one again, with its inode and time."""
    first = path.rename(path.parent / "first")
    path.write_bytes(b"other")
    first.replace(path)


@pytest.mark.parametrize("change", [replaced, rewritten, repointed, restored, os.remove])
def test_a_file_that_changes_between_two_looks_is_found(checkpoint, change):
    before = file_versions(files_of(checkpoint))
    assert changed_file(before, digest_files(files_of(checkpoint)).versions, may_download=False) is None
    time.sleep(TICK_S)
    change(checkpoint / "sub" / "b.bin")
    assert changed_file(before, file_versions(files_of(checkpoint)), may_download=True) == checkpoint / "sub" / "b.bin"


def test_a_file_that_a_download_wrote_is_no_change(checkpoint):
    before = file_versions(files_of(checkpoint)[:1])
    after = digest_files(files_of(checkpoint)).versions
    assert changed_file({}, after, may_download=True) is None
    assert changed_file(before, after, may_download=True) is None
    assert changed_file(before, after, may_download=False) == checkpoint / "sub" / "b.bin"


def test_a_link_that_stays_is_no_change(checkpoint):
    repointed(checkpoint / "sub" / "b.bin")
    before = file_versions(files_of(checkpoint))
    assert changed_file(before, digest_files(files_of(checkpoint)).versions, may_download=False) is None
    (checkpoint / "sub" / "b.bin").unlink()
    (checkpoint / "sub" / "b.bin").symlink_to("blob")
    assert changed_file(before, file_versions(files_of(checkpoint)), may_download=False) is not None


def test_the_versions_of_a_digest_are_those_before_its_read(checkpoint):
    before = file_versions(files_of(checkpoint))
    digest = digest_files(files_of(checkpoint))
    replaced(checkpoint / "a.safetensors")
    assert digest.versions == before != file_versions(files_of(checkpoint))
