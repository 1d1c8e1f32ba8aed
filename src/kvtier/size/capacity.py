"""What fits: tokens and sessions in GPU memory beside the weights, and in the bytes of a tier."""

from dataclasses import dataclass
from typing import NamedTuple

from kvtier.errors import ConfigError
from kvtier.report.format import decimal
from kvtier.size.sizes import KvSize

GPU_MEMORY_SHARE = 0.92
"""Share of GPU memory that the engine takes: vLLM 0.32, gpu_memory_utilization."""
GPU_OTHER_BYTES = 3_758_096_384
"""GPU memory for activations and libraries: NVIDIA AIConfigurator, system files, 2026-08-21."""
WEIGHT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5625}
"""Bytes of a weight; fp4 with a scale of one byte for each 16 (NVFP4)."""


class HeldSessions(NamedTuple):
    """Sessions of one length that fit."""

    session_tokens: int
    sessions: int
    """Whole sessions."""
    tokens: int
    """Tokens kept of all sessions, the last of which may be a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCapacity:
    """KV that equal GPUs hold beside the weights."""

    kv: KvSize
    gpus: int
    replicas: int
    """Copies of the model; each takes all ranks and stages."""
    memory_bytes: float
    """Memory of one GPU."""
    weight_bytes: float
    """Weights of one copy of the model."""
    rank_bytes: tuple[float, ...]
    """Bytes left for KV on a GPU of each stage."""
    in_flight_tokens: int
    """Tokens of all steps under way; windowed layers hold them beside their windows."""

    @property
    def kv_bytes(self) -> float:
        """Bytes left for KV on all GPUs."""
        return self.replicas * self.kv.tp * sum(self.rank_bytes)

    def held(self, tokens: int) -> HeldSessions:
        """Sessions of `tokens` at once, as vLLM's log counts them; the fullest stage of a copy is the limit."""
        needed = (self.kv.rank_session_bytes(stage, tokens, self.in_flight_tokens) for stage in range(self.kv.pp))
        of_copy = min((left / need for left, need in zip(self.rank_bytes, needed, strict=True) if need), default=0.0)
        return HeldSessions(tokens, self.replicas * int(of_copy), int(self.replicas * of_copy * tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCapacity:
    """KV that the bytes of a tier hold, as stored: chunks of all ranks, with headers and padding."""

    kv: KvSize
    capacity_bytes: int

    def held(self, tokens: int) -> HeldSessions:
        """Sessions of `tokens`: whole chunks, and one snapshot of the states; none without a whole chunk."""
        chunks, chunk_tokens = tokens // self.kv.chunk_tokens, self.kv.chunk_tokens
        chunk, state = (
            self.kv.tp * sum(it.frame_bytes for stage in self.kv.stage_objects for it in stage if keep(it.rule))
            for keep in ("state".__ne__, "state".__eq__)
        )
        if not chunks or not chunk + state:
            return HeldSessions(tokens, 0, 0)
        sessions, rest = divmod(self.capacity_bytes, chunks * chunk + state)
        more = max(0, rest - state) // chunk if chunk else 0
        return HeldSessions(tokens, sessions, (sessions * chunks + more) * chunk_tokens)


def in_flight_by_default(memory_bytes: float, pp: int) -> int:
    """Tokens of all steps under way: `pp` + 1 times a server's max_num_batched_tokens, both by default of vLLM 0.32."""
    return (pp + 1) * (16_384 if memory_bytes >= 160 << 30 else 8192 if memory_bytes >= 70 << 30 else 2048)


def gpu_capacity(
    kv: KvSize, memory_bytes: float, gpus: int, weight_bytes: float, in_flight_tokens: int | None = None
) -> GpuCapacity:
    """What `gpus` GPUs of `memory_bytes` each hold beside weights of `weight_bytes`.

    Args:
        kv: the sizes.
        memory_bytes: of one GPU.
        gpus: all of them.
        weight_bytes: of one copy of the model.
        in_flight_tokens: of all steps under way; by default `in_flight_by_default`.

    Raises:
        ConfigError: the ranks do not divide the GPUs, or the weights leave no room.
    """
    ranks = kv.tp * kv.pp
    if gpus < 1 or gpus % ranks:
        raise ConfigError(f"gpu: {gpus} GPUs are not a multiple of tp x pp = {ranks}")
    usable = memory_bytes * GPU_MEMORY_SHARE - GPU_OTHER_BYTES
    left = tuple(usable - weight_bytes * len(stage) / len(kv.model.layers) / kv.tp for stage in kv.stages)
    if min(left) <= 0:
        raise ConfigError(
            f"gpu: a GPU of {decimal(memory_bytes)} has {decimal(max(usable, 0))} for weights and KV, and its share of "
            f"the weights is {decimal(usable - min(left))}; more or larger GPUs, or smaller weights, are needed"
        )
    return GpuCapacity(
        kv=kv,
        gpus=gpus,
        replicas=gpus // ranks,
        memory_bytes=memory_bytes,
        weight_bytes=weight_bytes,
        rank_bytes=left,
        in_flight_tokens=in_flight_by_default(memory_bytes, kv.pp) if in_flight_tokens is None else in_flight_tokens,
    )
