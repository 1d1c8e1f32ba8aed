"""SGLang's offline engine, `sgl.Engine`: flags of its server as arguments, prompts on stdin, responses on stdout."""

import json
import os
import signal
import sys


def main() -> None:
    """Answer each prompt, one after the other."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    import sglang

    asked = json.load(sys.stdin)
    load_plugins()
    engine = sglang.Engine(server_args=prepare_server_args([*sys.argv[1:], "--skip-tokenizer-init"]))
    found = [engine.generate(input_ids=each, sampling_params=asked["sampling"]) for each in asked["prompts"]]
    print(json.dumps(found), flush=True)
    # Ends all processes of this session at once: `Engine.shutdown` may wait a minute for them.
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
