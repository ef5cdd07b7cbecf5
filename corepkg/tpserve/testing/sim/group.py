"""One generation of simulated ranks."""

from __future__ import annotations

import math

from tpserve.api import Announcement, Policy
from tpserve.errors import RankError
from tpserve.messages import StepOutput
from tpserve.scheduler.digest import DecisionLog
from tpserve.scheduler.replies import LocalReplies, NullReplies
from tpserve.scheduler.round import FollowerSource, LeaderSource, RoundSource
from tpserve.scheduler.scheduler import Scheduler
from tpserve.testing.fake_engine import FakeEngine
from tpserve.testing.sim.clients import Clients, Failure
from tpserve.testing.sim.faults import (
    Deviant,
    Fault,
    Meddler,
    PageSwapper,
    Retractor,
    Stopper,
    Striker,
    corrupt_announcement,
    corrupt_frame,
    must_be_noticed,
)
from tpserve.testing.sim.ledger import Ledger
from tpserve.testing.sim.links import FollowerEnd, Intake, LeaderEnd, Wire, WouldBlock
from tpserve.testing.sim.scenario import Scenario
from tpserve.testing.sim.state import FULL, NUMBERS, State, difference, state_of

__all__ = ["Group", "Member"]

WATCHDOG = 30.0


class Member:
    """One rank.

    Attributes:
        rank: its number.
        rounds: how many it has finished.
        is_over: it has ended, in order or not.
        error: why, if not in order.
    """

    def __init__(self, rank: int, source: RoundSource, scheduler: Scheduler, log: DecisionLog) -> None:
        self.rank = rank
        self.source = source
        self.scheduler = scheduler
        self.log = log
        self.rounds = 0
        self.is_over = False
        self.error: RankError | None = None


class Group:
    """A leader and its followers, wired together.

    Args:
        scenario: what they are.
        fault: what goes wrong.
        clients: get the answers.

    Attributes:
        intake: what the tokenizers send to.
        wires: from the leader to each follower.
        members: the ranks; the first leads.
        ledger: a second account of what the leader does.
        meddle_intake: what happens to frames on their way from the tokenizers, if anything does.
        is_down: a rank has failed, so all others will.
    """

    def __init__(self, scenario: Scenario, fault: Fault | None, clients: Clients) -> None:
        self.intake = Intake()
        self.is_down = False
        self._fault = fault
        self._clients = clients
        self._depth = 1 + scenario.budget.overlap
        self._states: list[State] = []
        self._differs_since: int | None = None
        size = len(scenario.paces)
        self.wires = [Wire(scenario.window) for _ in range(size - 1)]
        policies: list[Policy] = [scenario.policy(scenario.options) for _ in range(size)]
        self.meddle_intake: Meddler[bytes] | None = None
        self._stopper: Stopper | None = None
        self._swapper: PageSwapper | None = None
        self._announcements: Meddler[Announcement] | None = None
        self._striker = self._set_up(fault, policies)
        logs = [DecisionLog(rank) for rank in range(size)]
        end = LeaderEnd(self.wires)
        sources: list[RoundSource] = [
            LeaderSource(self.intake, end, end, logs[0], scenario.caps, math.inf, WATCHDOG),
            *[self._follower(wire, logs[rank], size) for rank, wire in enumerate(self.wires, start=1)],
        ]
        budget = scenario.budget
        engines = [FakeEngine(scenario.limits, budget.step_tokens, budget.chunk) for _ in range(size)]
        self.members = [
            Member(
                rank,
                sources[rank],
                Scheduler(
                    sources[rank],
                    NullReplies() if rank else LocalReplies(self._deliver),
                    engines[rank],
                    policies[rank],
                    logs[rank],
                    budget,
                    scenario.tokenizers,
                ),
                logs[rank],
            )
            for rank in range(size)
        ]
        self.ledger = Ledger(scenario, self.leader.scheduler, engines[0])

    @property
    def leader(self) -> Member:
        """Rank 0."""
        return self.members[0]

    @property
    def has_struck(self) -> bool:
        """Whether what goes wrong has happened."""
        return self._striker is not None and self._striker.has_struck

    @property
    def is_gullible(self) -> bool:
        """Whether nobody has noticed what happened to an announcement, and somebody had to."""
        struck = self._announcements.struck if self._announcements else None
        return not self.is_down and bool(self._fault and struck and must_be_noticed(self._fault, struck))

    def can_step(self, member: Member) -> bool:
        """Whether a rank would not wait for another."""
        if member.is_over or self.is_stuck(member.rank):
            return False
        if member.rank:
            return self.wires[member.rank - 1].has_news
        return all(wire.has_room for wire in self.wires)

    def is_stuck(self, rank: int) -> bool:
        """Whether a rank does nothing more."""
        return bool(self.wires) and (self.wires[rank - 1].follower_is_stuck if rank else self.wires[0].leader_is_stuck)

    def step(self, member: Member) -> bool:
        """Let a rank take a round, or only signs of life; whether it took anything.

        Raises:
            Failure: it is not in the state in which it should be.
            Exception: whatever the rank raises that it should not.
        """
        try:
            goes_on = member.scheduler.serve_round()
        except WouldBlock:
            return member.rank > 0
        except RankError as error:
            self._fail(member, error)
            return True
        member.rounds += 1
        if member.rank == 0:
            self.ledger.check(self.intake.note())
            if member.rounds % FULL == 0:
                self.ledger.check_everything()
        self._compare(member)
        if self._swapper:
            self._swapper.look(member.rank, member.rounds, member.scheduler.capacity.pool._pages._stack)
        if not goes_on:
            self._end(member)
        if self._stopper and self._stopper.strikes(member.rank, member.rounds):
            self._stop(member.rank)
        return True

    def take_down(self) -> None:
        """End whoever is left, as a supervisor does."""
        for member in self.members:
            if not member.is_over:
                member.is_over = True
                member.source.close()

    def _deliver(self, output: StepOutput) -> None:
        self.ledger.hear(output)
        self._clients.deliver(output)

    def _follower(self, wire: Wire, log: DecisionLog, size: int) -> FollowerSource:
        end = FollowerEnd(wire, log.rank, size)
        return FollowerSource(end, end, log, WATCHDOG, log.rank)

    # What goes wrong.

    def _set_up(self, fault: Fault | None, policies: list[Policy]) -> Striker | None:
        if fault is None:
            return None
        match fault.where:
            case "intake":
                self.meddle_intake = Meddler(fault, corrupt_frame)
                return self.meddle_intake
            case "frame":
                frames = self.wires[fault.rank - 1].meddle_frame = Meddler(fault, corrupt_frame)
                return frames
            case "announcement":
                self._announcements = Meddler(fault, corrupt_announcement)
                self.wires[fault.rank - 1].meddle_announcement = self._announcements
                return self._announcements
            case "plan":
                policies[fault.rank] = deviant = Deviant(policies[fault.rank], fault.after)
                return deviant
            case "retraction":
                policies[fault.rank] = retractor = Retractor(policies[fault.rank], fault.after)
                return retractor
            case "pages":
                self._swapper = PageSwapper(fault.rank, fault.after)
                return self._swapper
            case "stop":
                self._stopper = Stopper(fault.rank, fault.after)
                return self._stopper

    def _stop(self, rank: int) -> None:
        if rank:
            self.wires[rank - 1].follower_is_stuck = True
            return
        for wire in self.wires:
            wire.leader_is_stuck = True

    # What happens to a rank.

    def _fail(self, member: Member, error: RankError) -> None:
        """Let a rank go that has found something wrong; only the first has to have a reason."""
        is_well_told = (
            error.rank == member.rank and 0 <= error.round <= member.rounds and error.expected and error.found
        )
        if not is_well_told:
            raise Failure(f"rank {member.rank} stops in round {member.rounds} and says {error}")
        is_first = not self.is_down
        if is_first and not (self._fault and self.has_struck and self._fault.may_stop(member.rank)):
            raise Failure(f"rank {member.rank} stops without a reason") from error
        self.is_down = True
        member.error = error
        self._end(member)

    def _end(self, member: Member) -> None:
        member.is_over = True
        member.source.close()

    def _compare(self, member: Member) -> None:
        """Hold a rank to the leader's state; one that was made to differ must notice before it differs for long."""
        number = member.rounds - 1
        state = state_of(member.scheduler, member.log, number)
        if member.rank == 0:
            self._states.append(state)
        elif number == len(self._states) and self.leader.error:
            pass  # the leader failed after it had announced the round
        elif state != self._states[number]:
            fault = self._fault
            if fault is None or not self.has_struck or fault.rank != member.rank:
                raise Failure(f"rank {member.rank}, round {number}: {difference(state, self._states[number])}")
            if state[:NUMBERS] == self._states[number][:NUMBERS]:
                return  # others wait, or in another order, and nothing has been decided by that yet
            self._differs_since = number if self._differs_since is None else self._differs_since
            if number - self._differs_since >= self._depth:
                raise Failure(f"rank {member.rank} differs since round {self._differs_since} and does not notice")
