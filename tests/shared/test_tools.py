"""`kvtier inspect`, `kvtier probe` and `kvtier bench tier` on real shared stores, through the command line."""

import os
from contextlib import suppress
from pathlib import Path

import obstore
import pytest
from tests.shared.s3_world import frame_of, fresh_prefix, name_of
from tests.shared.tool_store import FEW, Store, use_tools

from kvtier.config import tier_list
from kvtier.config.loader import load
from kvtier.tools.probe.tiers import ProbeTarget, open_trial


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


def keys(gateway) -> set[str]:
    return {row["path"] for page in obstore.list(gateway.raw) for row in page}


@pytest.mark.parametrize(("store", "kind"), [("bucket", "s3"), ("folder", "shared_directory")])
def test_the_tools_on_a_store_in_use(request, store, kind):
    use_tools(request.getfixturevalue(store), kind)


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
