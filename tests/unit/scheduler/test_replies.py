"""Each detokenizer gets its requests, sealed and in sequence; followers stay silent."""

import math
import time

from tpserve.api import PipeSender
from tpserve.envelope import Opener
from tpserve.messages import PoolReport, Shutdown, Started, StepOutput, decode_step
from tpserve.scheduler.replies import LocalReplies, NullReplies, PipeReplies

OUTPUT = StepOutput(7, [10, 21, 12, 31], [1, 2, 3, -1], [None, "stop", None, "abort"], [Started(12, 5, 0)])


class FakePipe(PipeSender):
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.deadline = math.inf

    def connect(self, deadline: float) -> None: ...

    def send(self, frame: bytes, deadline: float) -> None:
        self.frames.append(frame)
        self.deadline = deadline

    def close(self) -> None: ...

    def messages(self):
        opener = Opener()
        return [decode_step(opener.open(frame)) for frame in self.frames]


def test_one_detokenizer_gets_everything():
    pipe = FakePipe()
    replies = PipeReplies([pipe], patience=60)
    replies.send(OUTPUT)
    replies.shutdown()
    assert pipe.messages() == [OUTPUT, Shutdown()]
    assert {int.from_bytes(frame[6:8], "little") for frame in pipe.frames} == {1000}
    assert time.monotonic() < pipe.deadline <= time.monotonic() + 60


def test_several_share_by_uid_and_each_sequence_has_no_gap():
    pipes = [FakePipe() for _ in range(3)]
    replies = PipeReplies(pipes, patience=60)
    replies.send(OUTPUT)
    replies.send(StepOutput(8, [21], [4], [None]))
    replies.shutdown()
    assert [pipe.messages() for pipe in pipes] == [
        [
            StepOutput(7, [21, 12], [2, 3], ["stop", None], [Started(12, 5, 0)]),
            StepOutput(8, [21], [4], [None]),
            Shutdown(),
        ],
        [StepOutput(7, [10, 31], [1, -1], [None, "abort"]), Shutdown()],
        [Shutdown()],
    ]


def test_what_the_pool_does_is_told_once_and_by_one_detokenizer():
    report = PoolReport(1, 20, 8, 3, 0.5)
    pipes = [FakePipe() for _ in range(3)]
    replies = PipeReplies(pipes, patience=60)
    replies.send(StepOutput(8, [21], [4], [None], pool=report))
    replies.send(StepOutput(9, [21], [4], [None]))
    assert [pipe.messages() for pipe in pipes] == [
        [StepOutput(8, [21], [4], [None], pool=report), StepOutput(9, [21], [4], [None])],
        [],
        [],
    ]
    replies.send(StepOutput(10, [22], [4], [None], pool=report))
    assert pipes[0].messages()[2:] == [StepOutput(10, [], [], [], pool=report)]
    assert pipes[1].messages() == [StepOutput(10, [22], [4], [None])]


def test_followers_say_nothing_and_local_outputs_are_delivered():
    NullReplies().send(OUTPUT)
    NullReplies().shutdown()
    delivered = []
    replies = LocalReplies(delivered.append)
    replies.send(OUTPUT)
    replies.shutdown()
    assert delivered == [OUTPUT]
