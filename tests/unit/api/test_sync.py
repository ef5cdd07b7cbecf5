from pathlib import Path

from tpserve.api import Announcement, FanoutSender, NoOptions, Sync, SyncContext


class Book(FanoutSender, Sync):
    """Notes what is asked of a leader's fan-out and sync."""

    def __init__(self) -> None:
        Sync.__init__(self, NoOptions(), SyncContext(0, 2, Path(), "sync", self))
        self.calls = []

    def connect(self, deadline): ...

    def announce(self, announcement, deadline):
        self.calls.append(("announce", announcement, deadline))

    def send_many(self, frames, deadline):
        self.calls.append(("send", list(frames), deadline))

    def receive(self, deadline): ...

    def barrier(self, deadline): ...

    def close(self): ...


def test_a_round_is_announced_and_then_sent():
    book, said = Book(), Announcement(0, 0, 2, -1, 0)
    book.send_round(said, [b"a", b"b"], 7.0)
    assert book.calls == [("announce", said, 7.0), ("send", [b"a", b"b"], 7.0)]
