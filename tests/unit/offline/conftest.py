"""An LLM whose engine is fake, and whose tokens are bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from tpserve.frontend.text import TextCodec
from tpserve.launch.rank import Rank
from tpserve.offline import LLM, llm
from tpserve.offline.local_rank import LocalRank
from tpserve.policies.fcfs import FcfsPolicy
from tpserve.policies.options import BatchingOptions
from tpserve.scheduler.digest import DecisionLog
from tpserve.scheduler.replies import ReplySink
from tpserve.scheduler.round import OfflineSource
from tpserve.scheduler.scheduler import Budget, Scheduler
from tpserve.step import Engine
from tpserve.testing.fake_engine import SMALL_LIMITS, FakeEngine

LIMITS = msgspec.structs.replace(SMALL_LIMITS, vocab_size=256, eos_ids=(255,), max_context=200)
"""Token 255 ends a text; the others are characters."""


def byte_codec() -> TextCodec:
    """Each token is one character of a byte-level alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextCodec(tokenizer)


class FakeRunning:
    """Stands in for a RunningEngine: a real scheduler on a real thread over a fake engine."""

    def __init__(self, engine: Engine) -> None:
        self.codec = byte_codec()
        self.engine = engine
        self.seen: list[object] = []
        source = OfflineSource()

        def compose(replies: ReplySink) -> Rank:
            resources = ExitStack()
            resources.callback(engine.close)
            log = DecisionLog(0)
            budget = Budget(running=8, step_tokens=64)
            scheduler = Scheduler(source, replies, engine, FcfsPolicy(BatchingOptions()), log, budget)
            return Rank(scheduler, engine.limits, resources)

        self._rank = LocalRank()
        self._rank.start(compose, source.put)
        self.limits = self._rank.wait_ready()
        self.next = self._rank.next

    def put(self, messages) -> None:
        self.seen += messages
        self._rank.put(messages)

    def close(self) -> None:
        self.closed_in_order = self._rank.close(30.0)


@pytest.fixture
def make_llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[LLM, FakeRunning]]]:
    """Make an LLM, and the fake engine that it runs on."""
    made: list[LLM] = []

    def make(engine: Engine | None = None) -> tuple[LLM, FakeRunning]:
        running = FakeRunning(engine or FakeEngine(LIMITS))
        monkeypatch.setattr(llm, "start_engine", lambda config, loading: running)
        made.append(LLM())
        return made[-1], running

    yield make
    for one in made:
        one.close()
