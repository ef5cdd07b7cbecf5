"""What is said at a door, before nng is given the connection, and what errors call who says it."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["OF_SENDER", "Words", "of_follower"]


class Words(NamedTuple):
    """Those of one kind of link.

    Attributes:
        greeting: what a guest says; all of a kind are of one length.
        answer: what the host says, once it is READY.
        guest: whom the host expects.
        host: who has a door.
        late: what has not happened if the host does not answer.
    """

    greeting: bytes
    answer: bytes
    guest: str
    host: str
    late: str


def of_follower(follower: int, followers: int) -> Words:
    """A fan-out's."""
    return Words(
        greeting=b"tpserve nng fan-out 2: follower %8d of %8d" % (follower, followers),
        answer=b"tpserve nng fan-out 2: ready",
        guest=f"follower {follower} of {followers}",
        host="leader",
        late="not all followers came",
    )


OF_SENDER = Words(
    greeting=b"tpserve nng pipe 3: sender",
    answer=b"tpserve nng pipe 3: ready",
    guest="any sender",
    host="receiver",
    late="the receiver did not answer",
)
"""A pipe's."""
