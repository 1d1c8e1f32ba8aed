"""Stores KV in one process and loads it in another, with the installed kvtier alone.

    python round_trip.py store|load tier KIND:WHERE [SECTION.KEY=VALUE ...]
    python round_trip.py store|load transformers DIRECTORY

`tests.release.release` copies it out of the checkout. The first form moves a prompt of random bytes, the second is a
small random Llama. A load compares what comes back with what was stored, and exits with an error where it differs.
"""

import sys
import time
from pathlib import Path

import kvtier

DEADLINE_S = 60.0
CHUNKS, CHUNK_TOKENS, BLOCK_BYTES, LAYERS = 4, 16, 8192, 2
TOKENS = CHUNKS * CHUNK_TOKENS


def tier(action: str, where: str, *flags: str) -> str:
    """A session over the tier `where` alone."""
    import numpy as np

    from kvtier.config.loader import load
    from kvtier.keys.chain import Chain
    from kvtier.layout import GroupLayout, History, KvLayout
    from kvtier.runtime.open import open_session
    from kvtier.testing.host_copier import HostCopier
    from kvtier.types import LoadDone, Place, Presence, RequestId, StoreDone

    layout = KvLayout(CHUNK_TOKENS, (GroupLayout(History(), (BLOCK_BYTES,) * LAYERS, "release"),))
    # Numbers that codecs can shorten.
    written = [
        np.random.default_rng(layer).integers(0, 4, (CHUNKS, BLOCK_BYTES), np.uint8, endpoint=True)
        for layer in range(LAYERS)
    ]
    blocks = written if action == "store" else [np.zeros_like(layer) for layer in written]
    config = load(None, {}, ["host.capacity_bytes=1MiB", *flags], [where]).config
    opened = open_session(config, layout, bytes(32), HostCopier(layout, [blocks]))
    session, request = opened.session, RequestId("one")
    chain = Chain(opened.root, CHUNK_TOKENS)
    chain.extend(list(range(TOKENS)))
    prefix, places = chain.prefix(), [Place(0, chunk, (chunk,)) for chunk in range(CHUNKS)]
    deadline = time.monotonic() + DEADLINE_S

    def ended(kind: type) -> object:
        while time.monotonic() < deadline:
            for event in session.poll(0.05):
                if isinstance(event, kind):
                    return event
        sys.exit(f"no {kind.__name__} within {DEADLINE_S:g} s")

    if action == "store":
        session.store(request, prefix, places)
        dropped = ended(StoreDone).dropped
        if dropped or not session.close().flushed:
            sys.exit(f"{dropped} chunks were dropped, or the rest did not reach the tier")
        return f"stored {TOKENS} tokens"
    while (found := session.lookup(request, prefix)).presence is Presence.PROBING and time.monotonic() < deadline:
        session.poll(0.05)
    if found.tokens == TOKENS:
        session.load(request, prefix, TOKENS, places)
        ended(LoadDone)
    session.close()
    if found.tokens != TOKENS or any(not np.array_equal(a, b) for a, b in zip(blocks, written, strict=True)):
        sys.exit(f"{found.tokens} of {TOKENS} tokens found, or other bytes came back")
    return f"loaded {TOKENS} tokens, the same bytes"


def transformers(action: str, directory: str) -> str:
    """`generate` with a small random model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvtier.connect.transformers import attach

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, initializer_range=0.35, **sizes)).eval()
    prompt = torch.randint(3, 512, (1, 600), generator=torch.Generator().manual_seed(1))
    alone = model.generate(prompt, max_new_tokens=16, do_sample=False)
    with attach(model, directory, host__capacity_bytes="64MiB") as kv:
        answer = kv.generate(prompt, max_new_tokens=16, do_sample=False)
        restored = kv.last.restored_tokens
    wanted = 0 if action == "store" else 512
    if restored != wanted or not torch.equal(answer, alone):
        sys.exit(f"restored {restored} tokens instead of {wanted}, or the answer is another: {answer.tolist()}")
    return f"restored {restored} of {prompt.shape[1]} tokens, the tokens of plain generate"


if __name__ == "__main__":
    if not Path(kvtier.__file__).is_relative_to(sys.prefix):
        sys.exit(f"kvtier is that of {kvtier.__file__}, not of this environment, {sys.prefix}")
    action, kind, *rest = sys.argv[1:]
    print({"tier": tier, "transformers": transformers}[kind](action, *rest))
