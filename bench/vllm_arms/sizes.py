"""Sizes of `bench/vllm.py`: of a CPU, of a GPU, and of a smoke test."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Sizes of all parts."""

    model: str
    prompt_tokens: int
    prompts: int
    """Samples of each time to first token."""
    pair_tokens: int
    """Prompts that measure the cost of a miss; short, so that a store has more weight."""
    pairs: int
    talks: int
    """Runs of each arm with the growing conversations."""
    conversations: int
    turns: int
    first_tokens: int
    turn_tokens: int
    answer_tokens: int
    running: int
    """Largest batch of the engine."""
    think_conversations: int
    think_turns: int
    think_first_tokens: int
    think_turn_tokens: int
    think_pairs: int
    """Runs of each arm."""
    throttled_tokens: int
    throttled_prompts: int
    host_bytes: int
    small_host_bytes: int
    """Smaller than the KV of the prompt."""
    engine_bytes: int
    """KV memory of the engine in float32, half of it in bfloat16; smaller than the conversations' KV."""

    @property
    def talk_tokens(self) -> int:
        """Length of the longest conversation, or more."""
        talk = self.first_tokens + self.turns * (self.turn_tokens + self.answer_tokens)
        think = self.think_first_tokens + self.think_turns * (self.think_turn_tokens + self.answer_tokens)
        return -(-max(talk, think) // 256) * 256


FULL = Sizes(
    model="llama-137m",
    prompt_tokens=8000,
    prompts=5,
    pair_tokens=600,
    pairs=20,
    talks=5,
    conversations=24,
    turns=3,
    first_tokens=300,
    turn_tokens=112,
    answer_tokens=16,
    running=8,
    think_conversations=12,
    think_turns=4,
    think_first_tokens=900,
    think_turn_tokens=250,
    think_pairs=5,
    throttled_tokens=4000,
    throttled_prompts=6,
    host_bytes=512 << 20,
    small_host_bytes=64 << 20,
    engine_bytes=200 << 20,
)

QUICK = Sizes(
    model="llama",
    prompt_tokens=3000,
    prompts=2,
    pair_tokens=1000,
    pairs=3,
    talks=1,
    conversations=8,
    turns=2,
    first_tokens=600,
    turn_tokens=200,
    answer_tokens=8,
    running=4,
    think_conversations=4,
    think_turns=3,
    think_first_tokens=600,
    think_turn_tokens=200,
    think_pairs=2,
    throttled_tokens=2000,
    throttled_prompts=2,
    host_bytes=16 << 20,
    small_host_bytes=2 << 20,
    engine_bytes=6 << 20,
)

GPU = Sizes(
    model="llama-8b",
    prompt_tokens=32_000,
    prompts=5,
    pair_tokens=1000,
    pairs=20,
    talks=1,
    conversations=24,
    turns=3,
    first_tokens=4000,
    turn_tokens=400,
    answer_tokens=100,
    running=24,
    think_conversations=12,
    think_turns=3,
    think_first_tokens=4000,
    think_turn_tokens=400,
    think_pairs=3,
    throttled_tokens=16_000,
    throttled_prompts=6,
    host_bytes=24 << 30,
    small_host_bytes=2 << 30,
    engine_bytes=16 << 30,
)
"""One GPU of 80 GB: weights of 14 GB, conversations of 17 GB of KV in 8 GiB."""
