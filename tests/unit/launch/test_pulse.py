from __future__ import annotations

import pytest

from tpserve.launch.pulse import Pulse, PulsingReceiver, PulsingSource
from tpserve.scheduler.round import Caps, SingleSource
from tpserve.testing.fake_server import make_pipe


def test_a_loop_beats_while_it_waits_and_when_it_has_turned() -> None:
    pulse = Pulse()
    assert [pulse.beats(), pulse.beats()] == [True, True]
    pulse.work()
    assert [pulse.beats(), pulse.beats()] == [True, False]
    pulse.wait()
    pulse.work()
    assert [pulse.beats(), pulse.beats()] == [True, False]
    pulse.wait()
    assert [pulse.beats(), pulse.beats()] == [True, True]


@pytest.mark.parametrize("kind", ["receiver", "source"])
def test_links_tell_when_their_user_works(kind: str) -> None:
    pulse = Pulse()
    _, receiver = make_pipe()
    link = (
        PulsingReceiver(receiver, pulse) if kind == "receiver" else PulsingSource(SingleSource(receiver, Caps()), pulse)
    )
    for _ in range(2):
        if isinstance(link, PulsingReceiver):
            assert link.recv_many(1, 1, 0.0) == []
        else:
            assert link.receive(block=False).messages == []
        assert [pulse.beats(), pulse.beats()] == [True, False]
    link.close()
