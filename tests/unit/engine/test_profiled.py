from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tpserve.engine.profiled import STEPS, WAIT, ProfiledEngine
from tpserve.testing.engine import generate

NEEDED = WAIT + STEPS + 2


def test_a_trace_is_of_steady_steps_of_the_largest_batch(small_model: Any, make_engine: Any, tmp_path: Path) -> None:
    path = tmp_path / "traces" / "rank0.json"
    engine = ProfiledEngine(make_engine(small_model("qwen3")), path)
    prompts = [[5, 6, 7], [8, 9], [10]]
    plain = generate(make_engine(small_model("qwen3")), prompts, NEEDED)

    generate(engine, prompts, NEEDED - 4)
    assert not path.exists()
    assert generate(engine, prompts[:2], NEEDED) == plain[:2]
    trace = msgspec.json.decode(path.read_bytes())["traceEvents"]
    assert sum(each.get("name") == "aten::embedding" for each in trace) == STEPS

    path.unlink()
    generate(engine, prompts[:2], NEEDED)
    assert not path.exists()
    assert generate(engine, prompts, NEEDED) == plain
    assert path.exists()
    engine.close()
