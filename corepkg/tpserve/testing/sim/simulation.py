"""One simulation: events and ranks in the order that the seed decides, until everything is answered."""

from __future__ import annotations

from collections import Counter
from random import Random

from tpserve.envelope import Sealer
from tpserve.messages import Abort, Generate, RankMessage, Shutdown, encode
from tpserve.testing.sim.clients import Clients, Failure
from tpserve.testing.sim.fairness import Fairness
from tpserve.testing.sim.faults import Fault
from tpserve.testing.sim.group import Group, Member
from tpserve.testing.sim.scenario import Event, Nap, Scenario

__all__ = ["Simulation"]

ENDLESS = 20_000
"""Rounds that no simulation takes, or something goes round in circles."""

NOBODY = 1 << 20
"""A uid that no request has."""


class Simulation:
    """All that one seed decides.

    Args:
        seed: any integer.

    Attributes:
        scenario: what is drawn before anything runs.
        clients: those who ask.
        rounds: how many the leaders have finished.
        seen: how often things have happened that a simulation is there for.
    """

    def __init__(self, seed: int) -> None:
        self._draw = Random(seed)
        self.scenario = Scenario.draw(self._draw)
        self.clients = Clients(self.scenario.limits)
        self.rounds = 0
        self.seen: Counter[str] = Counter()
        self._events = self.scenario.events[::-1]
        self._naps = [0] * len(self.scenario.paces)
        self._now = 0

    def run(self) -> None:
        """Run to the end.

        Raises:
            Failure: something is wrong; says what, in which round.
        """
        try:
            self._run()
        except Exception as error:  # whatever a rank raises is what a simulation looks for
            what = str(error) if isinstance(error, Failure) else f"{type(error).__name__}: {error}"
            raise Failure(f"round {self.rounds}: {what}") from error

    def _run(self) -> None:
        self._serve(self.scenario.fault)
        if self._group.is_down and not self.clients.is_ending:
            self.seen["another generation"] += 1
            self._serve(None)

    # One generation.

    def _serve(self, fault: Fault | None) -> None:
        self._group = group = Group(self.scenario, fault, self.clients)
        self._fairness = Fairness(self.scenario)
        self._sealers = [Sealer(index) for index in range(self.scenario.tokenizers)]
        self._is_stopping = self._has_nudged = False
        self._unborn: set[int] = set()  # Aborted before they were asked for.
        for message in self.clients.resubmit():
            self._send(message, message.uid)
        while any(not member.is_over and not group.is_stuck(member.rank) for member in group.members):
            while self._events and self._events[-1][0] <= self._now:
                self._happen(self._events.pop()[1])
            self._tick()
        if fault and group.has_struck:
            self.seen[f"fault: {fault.name}"] += 1
            self.seen[f"noticed: {fault.name}"] += group.is_down
        self._look_back()

    def _tick(self) -> None:
        """Let each rank take a round that is awake and has its turn."""
        group, draw, now = self._group, self._draw.random, self._now
        all_wait = True
        for member in group.members:
            if self._naps[member.rank] > now or draw() >= self.scenario.paces[member.rank]:
                all_wait &= member.is_over or group.is_stuck(member.rank)
            elif group.can_step(member):
                all_wait &= not self._step(member)
        if all_wait:
            self._wait()
        else:
            self._now += 1

    def _step(self, member: Member) -> bool:
        if member.rank:
            return self._group.step(member)
        self._group.intake.beats = self._group.is_down or self._draw.random() < self.scenario.beat
        has_moved = self._group.step(member)
        if has_moved:
            self.rounds += 1
            self._check_turns(member)
            if not self._group.has_struck:
                self.clients.check_aborts(all_taken=not self._group.intake.frames)
        return has_moved

    def _check_turns(self, leader: Member) -> None:
        """Check who was served in a round, and that rounds come to an end."""
        if not leader.is_over:
            self._fairness.check(leader.scheduler.queues)
        if self.rounds > ENDLESS:
            raise Failure(f"requests {[*self.clients.alive]} are not answered in {ENDLESS} rounds")

    def _wait(self) -> None:
        """Go on to the next event. After the last, stop the ranks."""
        group = self._group
        if self._events:
            self._now = max(self._now + 1, self._events[-1][0])
        elif self.clients.alive and group.has_struck and not self._has_nudged:
            self._nudge()
        elif not self._is_stopping:
            if self.clients.alive:
                raise Failure(f"nobody answers requests {[*self.clients.alive]}")
            self._stop()
        elif group.has_struck:
            group.take_down()
        else:
            raise Failure("all ranks wait and nothing comes")

    def _look_back(self) -> None:
        """Check how a generation ended."""
        group, clients = self._group, self.clients
        self.seen["evictions"] += group.leader.scheduler.capacity.pool.counters.evicted > 0
        self.seen["cached tokens"] += group.leader.scheduler.capacity.pool.counters.found > 0
        self.seen["retraction"] += self._fairness.retractions > 0
        for member in group.members:
            member.scheduler.check()
        if not group.leader.error:
            group.ledger.check_everything()
        if group.is_gullible:
            raise Failure("an announcement was lost, doubled, altered or swapped, and no follower stops")
        if group.is_down:
            return
        if clients.alive:
            raise Failure(f"requests {[*clients.alive]} were never answered")
        group.ledger.check_reports()
        if not group.has_struck and len({member.log.latest for member in group.members}) > 1:
            raise Failure(f"digests differ in the end: {[member.log.latest for member in group.members]}")

    # What happens.

    def _happen(self, event: Event) -> None:
        clients = self.clients
        match event:
            case Nap():
                self._naps[event.rank] = self._now + event.ticks
            case Shutdown():
                clients.is_ending = True
                self._stop()
            case Generate() if not self._is_stopping:
                is_aborted = event.uid in self._unborn
                clients.ask(event, is_aborted=is_aborted)
                self._send(event, event.uid)
            case Abort() if not self._is_stopping:
                self.seen[f"abort: {self._phase(event.uid)}"] += 1
                clients.abort(event.uid)
                self._unborn.add(event.uid)
                self._send(event, event.uid)

    def _stop(self) -> None:
        self._is_stopping = True
        for index in range(self.scenario.tokenizers):
            self._send(Shutdown(), index)

    def _nudge(self) -> None:
        """Send something that means nothing by each tokenizer: a frame that was lost or held up shows by the next."""
        self._has_nudged = True
        for index in range(self.scenario.tokenizers):
            self._send(Abort(NOBODY), index)

    def _send(self, message: RankMessage, uid: int) -> None:
        frame = self._sealers[uid % len(self._sealers)].seal(encode(message))
        meddle = self._group.meddle_intake
        self._group.intake.frames.extend(meddle(frame) if meddle else [frame])

    def _phase(self, uid: int) -> str:
        """Where a request stands at the leader."""
        queues = self._group.leader.scheduler.queues
        request = queues.get(uid)
        if request is None:
            return "under way" if uid in self.clients.alive else "before or after"
        if request.uid not in queues.running:
            return "retracted" if request.has_started else "waiting"
        if request.pending:
            return "mid-prompt"
        return "decoding" if uid in queues.decoding else "last token"
