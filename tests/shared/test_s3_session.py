"""Sessions of several nodes share KV through a bucket, and an S3 server that fails costs them misses only."""

import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.rig import Engine
from tests.shared.node_sessions import TOKENS, await_health, changes, load, load_until, opened, store
from tests.shared.s3_world import fresh_prefix

from kvtier.tier.disk.kind import DiskSettings
from kvtier.tier.s3.kind import S3Settings


def bucket(access, prefix, **settings) -> S3Settings:
    common = {"transfer_deadline_s": 2.0, "probe_deadline_s": 0.5, "failures": 1, "retry_s": 0.2}
    return S3Settings(
        url=f"{access.bucket}/{prefix}",
        endpoint=access.endpoint,
        region=access.region,
        access_key_id=access.access_key,
        secret_access_key=access.secret_key,
        allow_http=True,
        **common | settings,
    )


@pytest.mark.shared_core
def test_what_one_node_stores_another_loads_and_other_secrets_do_not(gateway, tmp_path):
    prefix, here = fresh_prefix(), Engine(64, seed=1)
    session = opened(here, DiskSettings(path=tmp_path / "a", capacity_bytes=64 << 20), bucket(gateway.access, prefix))
    store(session)
    session.close()
    there = Engine(64, seed=2)
    session = opened(there, DiskSettings(path=tmp_path / "b", capacity_bytes=64 << 20), bucket(gateway.access, prefix))
    assert load(session, there, here) == TOKENS
    session.close()
    session = opened(there, bucket(gateway.access, prefix), secret=bytes(32))
    assert load(session, there, here) == 0
    session.close()


@pytest.mark.shared_core
def test_a_gateway_that_is_away_at_the_start_or_in_the_middle_costs_misses_until_it_is_back(gateway, ceph, caplog):
    caplog.set_level(logging.INFO)
    prefix, here, there = fresh_prefix(), Engine(64, seed=1), Engine(64, seed=2)
    session = opened(here, bucket(gateway.access, prefix))
    store(session)
    session.close()
    gateway.daemon.kill()
    start_s = time.monotonic()
    session = opened(there, bucket(gateway.access, prefix))
    assert load(session, there, here) == 0
    assert time.monotonic() - start_s < 15
    gateway.daemon.start()
    ceph.wait_gateway()
    load_until(session, there, here, TOKENS)
    session.close()
    lines = [record.getMessage() for record in caplog.records]
    assert [sum(text in line for line in lines) for text in ("starts without this tier", "is open now")] == [1, 1]
    assert changes(caplog, "read") == ["up"], "the first line has said that it is down"

    session = opened(there, bucket(gateway.access, prefix))

    def slow():
        gateway.proxy.delay_s = 3.0  # above both deadlines

    for break_it, mend in (
        (slow, gateway.proxy.heal),
        (gateway.proxy.partition, gateway.proxy.heal),
        (gateway.daemon.pause, gateway.daemon.resume),
    ):
        break_it()
        caplog.clear()
        start_s = time.monotonic()
        assert load(session, there, here) == 0
        assert time.monotonic() - start_s < 5
        await_health(session, caplog, ["down"])
        mend()
        await_health(session, caplog, ["down", "up"])
        assert len(caplog.records) <= 8, "of each kind of fault one line, and one of each change"
    load_until(session, there, here, TOKENS)
    session.close()


def test_inspect_shows_what_is_in_the_bucket(gateway, monkeypatch):
    prefix, here = fresh_prefix(), Engine(64, seed=1)
    session = opened(here, bucket(gateway.access, prefix))
    store(session)
    session.close()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", gateway.access.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", gateway.access.secret_key)
    url = f"s3://{gateway.access.bucket}/{prefix}?endpoint={gateway.access.endpoint}&allow_http=true"

    def stat() -> dict:
        command = [Path(sys.executable).parent / "kvtier", "inspect", "stat", url, "--json"]
        done = subprocess.run(command, timeout=60, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert stat()["objects"] == 8
