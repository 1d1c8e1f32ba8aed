"""Three lines around `model.generate`, with a small random model so that nothing is downloaded.

Run it twice: the second process restores what the first one computed.

    python examples/transformers_quickstart.py [DIRECTORY]
"""

# ruff: noqa: INP001, T201 - a program to read and run

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.connect.transformers import attach


def main() -> None:
    """Generate twice from one prompt and tell what it cost."""
    directory = sys.argv[1] if len(sys.argv) > 1 else "kv-quickstart"
    torch.manual_seed(0)
    settings = LlamaConfig(vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=8)
    model = LlamaForCausalLM(settings).eval()
    prompt = torch.randint(3, 4096, (1, 1500), generator=torch.Generator().manual_seed(1))

    with attach(model, directory, host__capacity_bytes="256MiB") as kv:
        for attempt in ("first", "second"):
            _, report = kv.generate(prompt, max_new_tokens=16, do_sample=False, return_report=True)
            restored = ", ".join(f"{tokens} from {place}" for place, tokens in report.restored_by_source.items())
            print(
                f"{attempt} call: {1e3 * report.ttft_s:6.0f} ms to the first token, {report.computed_tokens} tokens "
                f"computed, {restored or 'none'} restored"
            )


if __name__ == "__main__":
    main()
