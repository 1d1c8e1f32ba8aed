"""Sessions of several nodes share KV through a bucket, and an S3 server that fails costs them misses only."""

from typing import ClassVar

import obstore
import pytest
from tests.shared.node_sessions import QUICK, ServerSessionContract
from tests.shared.s3_world import fresh_prefix

from kvtier.tier.s3.kind import S3Settings


@pytest.mark.shared_core
class TestS3(ServerSessionContract):
    harmless: ClassVar = {"longer": lambda frame: frame + b"x" * 4096}  # what follows a whole frame is not read

    @pytest.fixture
    def places(self, gateway):
        access, self.prefix, self.raw = gateway.access, fresh_prefix(), gateway.raw
        settings = S3Settings(
            url=f"{access.bucket}/{self.prefix}",
            endpoint=access.endpoint,
            region=access.region,
            access_key_id=access.access_key,
            secret_access_key=access.secret_key,
            allow_http=True,
            **QUICK,
        )
        return settings, settings

    @pytest.fixture
    def server(self, gateway):
        return gateway.daemon.kill, gateway.start

    @pytest.fixture
    def faults(self, gateway):
        proxy = gateway.proxy
        return (
            (lambda: setattr(proxy, "delay_s", 3.0), proxy.heal),  # above both deadlines
            (proxy.partition, proxy.heal),
            (gateway.daemon.pause, gateway.daemon.resume),
        )

    def frames(self):
        keys = [row["path"] for page in obstore.list(self.raw, self.prefix) for row in page]
        return {key: bytes(obstore.get(self.raw, key).bytes()) for key in keys if len(key.rpartition("/")[2]) == 64}

    def replace(self, key, frame):
        obstore.put(self.raw, key, frame)
