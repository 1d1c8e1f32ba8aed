"""No path, key or listing of a shared store tells which model is served: the model id is keyed with the secret."""

import json
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
from tests.rig import FINGERPRINT, LAYOUT, Engine, config, places_of, prefix_of, stored
from tests.small_s3 import BUCKET, SmallS3
from tests.system import until

from kvtier.cli.main import run
from kvtier.config.sections import Config, StoreConfig
from kvtier.config.value_types import PrivateText
from kvtier.connect.model_files import note_fingerprint
from kvtier.keys.fingerprint import Fingerprint
from kvtier.keys.secret import Secret, key_id, model_id
from kvtier.runtime.open import open_session
from kvtier.tier.s3.kind import S3Settings
from kvtier.tier.shared_directory.kind import SharedDirectorySettings

SECRET = Secret(bytes(range(32)))
SERVED = Fingerprint(weights=bytes(32), dtype="bfloat16")
DIGITS = 16
"""Of a fingerprint or model id: as many as tables and names of notes show."""
CHUNKS, OBJECTS = 3, 6


@contextmanager
def in_directory(tmp_path):
    root = tmp_path / "kv"
    names = lambda: {str(path.relative_to(root)) for path in root.rglob("*")}  # noqa: E731
    yield SharedDirectorySettings(path=root, capacity_bytes=1 << 30), f"shared_directory:{root}", names


@contextmanager
def in_bucket(_tmp_path):
    with SmallS3() as server:
        settings = S3Settings(
            url=f"s3://{BUCKET}/kv",
            endpoint=server.endpoint,
            allow_http=True,
            region="us-east-1",
            access_key_id=PrivateText("key"),
            secret_access_key=PrivateText("secret"),
        )
        url = f"s3:{BUCKET}/kv?endpoint={server.endpoint}&allow_http=true&region=us-east-1"
        yield settings, f"{url}&access_key_id=key&secret_access_key=secret", lambda: set(server.objects)


def serve(settings, secret) -> Config:
    """Store chunks of the model `SERVED`, and its note, as an engine does."""
    made = replace(config(None, host_chunks=20), tiers=(settings,), store=StoreConfig(secret=secret))
    kv = open_session(made, LAYOUT, SERVED.digest, Engine(64, seed=1).copier())
    assert stored(kv.session, "a", prefix_of(CHUNKS, kv.root), places_of(range(CHUNKS))).dropped == 0
    note_fingerprint(made, SERVED)
    until(lambda: "kvtier note" not in {thread.name for thread in threading.enumerate()})
    assert kv.session.close().flushed
    return made


@pytest.mark.parametrize("world", [in_directory, in_bucket])
def test_paths_and_listings_have_the_model_id_and_not_the_fingerprint(tmp_path, capsys, world):
    with world(tmp_path) as (settings, url, names):
        serve(settings, SECRET)
        model, own = model_id(SECRET, SERVED.digest).hex(), f"{key_id(SECRET).hex()}/"
        shown = [*names()]
        assert sum(f"{own}{model}/" in name for name in shown) >= OBJECTS
        assert not [name for name in shown if "note-" in name], "a store that seals has no notes"
        for words in (("stat", url), ("stat", url, "--json"), ("ls", url), ("ls", url, "--json")):
            assert run(["inspect", *words]) == 0
            shown.append(capsys.readouterr().out)
        assert list(json.loads(shown[-3])["models"]) == [model[:12]]
        assert {row["model"] for row in json.loads(shown[-1])["objects"]} == {model}
        assert SERVED.digest[: DIGITS // 2].hex() not in "\n".join(shown)


def test_a_note_is_named_by_the_model_id(tmp_path):
    with in_directory(tmp_path) as (settings, _url, names):
        serve(replace(settings, seal="off"), SECRET)
        assert f"note-model-{model_id(SECRET, SERVED.digest).hex()[:DIGITS]}.json" in names()


def test_each_secret_has_an_id_of_its_own_for_one_model(tmp_path):
    secrets = [SECRET, Secret(b"s" * 32)]
    ids = [model_id(secret, SERVED.digest) for secret in secrets]
    assert len({*ids, model_id(None, SERVED.digest), model_id(SECRET, FINGERPRINT)}) == 4
    assert {len(each) for each in ids} == {16}
    with in_directory(tmp_path) as (settings, _url, names):
        for secret in secrets:
            serve(settings, secret)
        places = {tuple(name.split("/")[:2]) for name in names() if name.count("/") == 3}
        assert places == {(key_id(secret).hex(), each.hex()) for secret, each in zip(secrets, ids, strict=True)}
