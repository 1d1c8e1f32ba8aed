"""`kvtier inspect`, `kvtier probe` and `kvtier bench tier` on real shared stores, through the command line."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import obstore
import pytest
from tests.rig import FINGERPRINT, LAYOUT, Engine, places_of, prefix_of, stored
from tests.shared.s3_world import frame_of, fresh_prefix, name_of

from kvtier.config import tier_list
from kvtier.config.loader import load
from kvtier.probe.tiers import ProbeTarget, open_trial
from kvtier.runtime.open import open_session

FEW = ("--size", "64KiB", "--in-flight", "2", "--repeats", "1", "--sample", "128KiB", "--json")
DEADLINE_S = 120


class Store:
    """One shared store as the commands name it."""

    def __init__(self, url: str, folder: Path, **variables: str) -> None:
        self.url = url
        self.secret = folder / "secret"
        self.secret.write_bytes(bytes(range(32)))
        self.secret.chmod(0o600)
        self.environment = {"KVTIER_STORE__SECRET_FILE": str(self.secret)} | variables

    def kvtier(self, *arguments: object, code: int = 0, **variables: str) -> str:
        done = subprocess.run(
            [Path(sys.executable).parent / "kvtier", *map(str, arguments)],
            env=os.environ | self.environment | variables,
            timeout=DEADLINE_S,
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    def fill(self) -> None:
        environment = self.environment | {"KVTIER_HOST__CAPACITY_BYTES": "16MiB", "KVTIER_TIERS": self.url}
        kv = open_session(load(environ=environment).config, LAYOUT, FINGERPRINT, Engine(64, seed=1).copier())
        assert stored(kv.session, "a", prefix_of(6, kv.root), places_of(range(6))).dropped == 0
        assert kv.session.close().flushed


@pytest.fixture
def bucket(gateway, tmp_path, monkeypatch) -> Store:
    access = gateway.access
    variables = {"AWS_ACCESS_KEY_ID": access.access_key, "AWS_SECRET_ACCESS_KEY": access.secret_key}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{access.bucket}/{fresh_prefix()}?endpoint={access.endpoint}&allow_http=true"
    return Store(url, tmp_path, **variables)


@pytest.fixture
def folder(mounts, tmp_path) -> Store:
    return Store(f"shared_directory:{mounts[0]}/tools-{os.urandom(4).hex()}", tmp_path)


@pytest.fixture(params=["bucket", "folder"])
def shared_store(request) -> Store:
    return request.getfixturevalue(request.param)


def keys(gateway) -> set[str]:
    return {row["path"] for page in obstore.list(gateway.raw) for row in page}


def test_the_tools_on_a_store_in_use(shared_store):
    it, url = shared_store, shared_store.url
    it.fill()
    before = json.loads(it.kvtier("inspect", "stat", url, "--json"))
    assert (before["objects"], list(before["fingerprints"])) == (12, [FINGERPRINT.hex()[:12]])
    rows = json.loads(it.kvtier("bench", "tier", url, *FEW))["results"]
    assert {(row["op"], row["path"]) for row in rows} == {
        (op, path) for op in ("store", "load", "lookup") for path in ("raw", "tier", "session")
    }
    probed = json.loads(
        it.kvtier(
            "probe", "--tier", url, "--size", "64KiB", "--depth", "1", "--seconds", "50ms", "--bytes", "8MiB", "--json"
        )
    )
    (link,) = [link for link in probed["links"] if link["name"] in {"s3", "shared_directory"}]
    assert {each["op"] for each in link["measures"]} == {"read", "write"}
    assert link["round_trip_us"] > 0
    after = json.loads(it.kvtier("inspect", "stat", url, "--json"))
    assert (after["objects"], after["bytes"]) == (before["objects"], before["bytes"]), "measurements leave nothing"
    assert "12 objects" in it.kvtier("inspect", "verify", url)
    assert json.loads(it.kvtier("inspect", "purge", url, "--yes", "--json"))["objects"] == 12
    assert json.loads(it.kvtier("inspect", "stat", url, "--json"))["objects"] == 0


def test_a_bucket_is_measured_without_a_secret_and_left_as_it_was(bucket, gateway):
    bucket.fill()
    before = keys(gateway)
    bucket.kvtier("bench", "tier", bucket.url, *FEW, KVTIER_STORE__SECRET_FILE="")
    assert keys(gateway) == before


@pytest.mark.parametrize("has_secret", [True, False])
def test_a_measurement_that_is_broken_off_leaves_nothing(bucket, gateway, has_secret):
    bucket.fill()
    before = keys(gateway)
    config = load(environ=bucket.environment if has_secret else {}).config
    target = ProbeTarget(tier_list.parse(bucket.url), config, is_configured=True)
    with suppress(KeyboardInterrupt), open_trial(target, Path(), 4096, 4096) as trial:
        trial.tier.write(name_of(1), frame_of(1))
        assert len(keys(gateway)) == len(before) + (1 if has_secret else 2), "an object, and a marker of a key id"
        raise KeyboardInterrupt
    assert keys(gateway) == before


def test_a_damaged_object_in_a_bucket_is_found_and_removed(bucket, gateway):
    bucket.fill()
    key = max(keys(gateway), key=len)
    frame = bytes(obstore.get(gateway.raw, key).bytes())
    obstore.put(gateway.raw, key, frame[:-1] + b"?")
    assert bucket.kvtier("inspect", "verify", bucket.url, "--repair", code=1) == ""
    assert key not in keys(gateway)
    bucket.kvtier("inspect", "verify", bucket.url)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("kvtier/", "nobucket/"), "NoSuchBucket"),
        (("127.0.0.1", "127.0.0.1:1/x"), "allowed: https://HOST[:PORT]"),
    ],
)
def test_a_wrong_url_is_one_line(bucket, change, why):
    url = bucket.url.replace(*change)
    for command in (("bench", "tier", url), ("inspect", "stat", url)):
        err = bucket.kvtier(*command, code=2)
        assert why in err
        assert err.count("\n") == 1


@pytest.mark.shared_core
def test_wrong_credentials_are_one_line_without_them(bucket):
    for command in (
        ("bench", "tier", bucket.url),
        ("inspect", "stat", bucket.url),
        ("inspect", "purge", bucket.url, "--yes"),
    ):
        err = bucket.kvtier(*command, code=2, AWS_SECRET_ACCESS_KEY="wrong" * 8)
        assert "SignatureDoesNotMatch" in err
        assert "wrongwrong" not in err
        assert err.count("\n") == 1
