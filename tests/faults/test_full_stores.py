"""A tier that refuses all writes says so once, and once that it takes them again; not once per object."""

import pytest
from mover_world import World
from tests.memory_tier import MemoryTier
from tests.small_s3 import SmallS3, open_tier, refusing

from kvtier.runtime.command_runner import REFUSED_MIN
from kvtier.tier import refusal_log
from kvtier.types import Direction, Outcome

WRITES = 3 * REFUSED_MIN


class Full(MemoryTier):
    """A tier of another package: `write` returns False and logs nothing."""

    is_full = True

    def write_one(self, name, frame, about):
        return not self.is_full and super().write_one(name, frame, about)


def demoted(world: World, count: int) -> set[Outcome]:
    writes = [world.transfer(Direction.DEMOTE, 1, 0) for _ in range(count)]
    return {world.run(write)[0].outcome for write in writes}


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return found


@pytest.fixture(autouse=True)
def _at_once(monkeypatch, caplog):
    monkeypatch.setattr(refusal_log, "QUIET_S", 0.0)
    caplog.set_level("INFO", "kvtier")


def test_a_tier_without_a_reason(caplog):
    tier = Full(capacity_bytes=1 << 24)
    with World({"memory": tier}) as world:
        world.done(world.transfer(Direction.GATHER, 1, 0))
        assert demoted(world, REFUSED_MIN - 1) == {Outcome.FAILED}
        assert lines(caplog) == [], "a policy may refuse some"
        assert demoted(world, WRITES) == {Outcome.FAILED}
        why = f"the last {REFUSED_MIN} were not admitted"
        assert lines(caplog) == [("WARNING", f"tier memory refuses writes: {why}")]
        tier.is_full = False
        assert demoted(world, 3) == {Outcome.DONE}
        assert lines(caplog) == [("INFO", "tier memory takes writes again")]


@pytest.mark.parametrize(("status", "code"), [(403, "QuotaExceeded"), (507, "XMinioStorageFull"), (507, "")])
def test_a_bucket_over_its_quota(caplog, status, code):
    with SmallS3() as server:
        tier = open_tier(server.endpoint, name="memory")
        with World({"memory": tier}) as world:
            world.done(world.transfer(Direction.GATHER, 1, 0))
            server.answers.append(refusing(status, code, "PUT"))
            assert demoted(world, 5) == {Outcome.FAILED}
            ((level, text),) = lines(caplog)
            assert level == "WARNING"
            assert text.startswith("tier memory refuses writes: bucket")
            assert f"HTTP {status}" in text
            server.answers.clear()
            assert demoted(world, 3) == {Outcome.DONE}
            assert lines(caplog) == [("INFO", "tier memory takes writes again")]
        tier.close()
