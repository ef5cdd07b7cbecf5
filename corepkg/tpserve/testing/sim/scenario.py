"""What a seed decides before anything runs: limits, policy, what clients do, how fast ranks are, what goes wrong."""

from __future__ import annotations

from random import Random

import msgspec

from tpserve.api import Options, Policy
from tpserve.messages import Abort, Generate, SamplingParams, Shutdown
from tpserve.policies.fcfs import FcfsPolicy
from tpserve.policies.lpm import LpmPolicy
from tpserve.policies.options import BatchingOptions, LpmOptions, PriorityOptions
from tpserve.policies.priority import PriorityPolicy
from tpserve.scheduler.round import Caps
from tpserve.scheduler.scheduler import Budget
from tpserve.step import EngineLimits
from tpserve.testing.sim.faults import Fault
from tpserve.tokens import pack_ids

__all__ = ["Event", "Nap", "Scenario"]

MAX_CONTEXT = 48


class Nap(msgspec.Struct, frozen=True):
    """A rank does nothing for so many ticks."""

    rank: int
    ticks: int


Event = Generate | Abort | Shutdown | Nap


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation.

    Attributes:
        limits: what each engine has.
        budget: what the schedulers are told.
        policy: decides.
        options: about it.
        caps: how much a round takes.
        tokenizers: a request goes through that of its uid.
        window: how many rounds a follower may be behind.
        paces: how likely each rank takes a round in a tick.
        beat: how likely an idle leader shows life in a tick.
        events: what happens when, by tick.
        fault: what goes wrong.
    """

    limits: EngineLimits
    budget: Budget
    policy: type[Policy]
    options: Options
    caps: Caps
    tokenizers: int
    window: int
    paces: list[float]
    beat: float
    events: list[tuple[int, Event]]
    fault: Fault | None

    @classmethod
    def draw(cls, draw: Random) -> Scenario:
        """Any."""
        followers = draw.choice([1, 1, 1, 2, 3])
        policy, options = _draw_policy(draw)
        limits = _draw_limits(draw)
        return cls(
            limits=limits,
            budget=Budget(
                running=draw.randint(1, 8),
                step_tokens=draw.choice([1, 7, 30, 200]),
                chunk=draw.choice([0, 0, 1, 7]),
                cache=draw.random() < 0.7,
                overlap=draw.random() < 0.6,
            ),
            policy=policy,
            options=options,
            caps=Caps(messages=draw.choice([1, 3, 256, 256]), bytes=draw.choice([100, 1 << 20])),
            tokenizers=draw.choice([1, 1, 2]),
            window=draw.choice([1, 2, 8, 40]),
            paces=[draw.choice([1.0, 1.0, 0.7]), *[draw.choice([1.0, 1.0, 0.8, 0.4]) for _ in range(followers)]],
            beat=draw.choice([0.0, 0.05, 0.5]),
            events=_draw_events(draw, limits, followers),
            fault=Fault.draw(draw, followers) if draw.random() < 0.4 else None,
        )


def _draw_policy(draw: Random) -> tuple[type[Policy], Options]:
    options: dict[str, object] = {
        "order": draw.choice(["mixed", "mixed", "prefill", "decode"]),
        "reserve": draw.choice([0.0, 0.0, 0.5, 1.0]),
    }
    ageing = draw.choice([1, 8, 100])
    match draw.randrange(3):
        case 0:
            return FcfsPolicy, msgspec.convert(options, BatchingOptions)
        case 1:
            window = draw.choice([1, 4, 64])
            return LpmPolicy, msgspec.convert({**options, "ageing": ageing, "window": window}, LpmOptions)
        case _:
            return PriorityPolicy, msgspec.convert({**options, "ageing": ageing}, PriorityOptions)


def _draw_limits(draw: Random) -> EngineLimits:
    page_size = draw.choice([1, 3, 4, 16])
    return EngineLimits(
        pages=-(-MAX_CONTEXT // page_size) + draw.randrange(60 // page_size + 1) - draw.choice([0, 0, 0, 1]),
        page_size=page_size,
        slots=draw.randint(1, 9),
        max_context=MAX_CONTEXT,
        vocab_size=draw.choice([10, 50, 1000]),
        eos_ids=draw.choice([(), (1,), (1, 2)]),
    )


def _draw_events(draw: Random, limits: EngineLimits, followers: int) -> list[tuple[int, Event]]:
    """Requests in some rhythm, aborts of some of them at any time, all those of a client at once, and pauses."""
    events: list[tuple[int, Event]] = []
    beginnings = [[draw.randrange(limits.vocab_size) for _ in range(16)] for _ in range(3)]
    rhythm, aborts, outputs = draw.choice([0.3, 1.0, 4.0]), draw.choice([0.0, 0.1, 0.5]), draw.choice([4, 12, 30])
    tick = 0
    for uid in range(draw.randint(1, 50)):
        tick += int(draw.expovariate(1 / rhythm)) if draw.random() < 0.95 else 60
        events.append((tick, _draw_request(draw, uid, limits, beginnings, outputs)))
        if draw.random() < aborts:
            events.append((max(0, tick + draw.choice([-1, 0, 1, draw.randrange(8), draw.randrange(60)])), Abort(uid)))
        if draw.random() < aborts / 10:
            events += [(tick, Abort(other)) for other in range(uid % 3, uid, 3)]
    for _ in range(draw.choice([0, 0, 3])):
        events.append((draw.randrange(tick + 1), Nap(draw.randint(0, followers), draw.randrange(1, 60))))
    if draw.random() < 0.3:
        events.append((draw.randrange(tick + 1), Shutdown()))
    events.sort(key=_tick)
    return events


def _draw_request(draw: Random, uid: int, limits: EngineLimits, beginnings: list[list[int]], outputs: int) -> Generate:
    vocabulary = limits.vocab_size
    prompt = draw.choice(beginnings)[: draw.choice([0, 4, 12, 16])]
    prompt = prompt + [draw.randrange(vocabulary) for _ in range(draw.choice([1, 2, 6, 12]))]
    output = [draw.randrange(vocabulary) for _ in range(draw.choice([0] * 6 + [1, 6]))]
    if draw.random() < 0.02:
        prompt = draw.choice([[], prompt * 4])
    params = SamplingParams(
        temperature=draw.choice([0.0, 0.7]),
        top_k=draw.choice([0, 0, 20]),
        top_p=draw.choice([1.0, 1.0, 0.9]),
        min_p=draw.choice([0.0, 0.0, 0.05]),
        max_tokens=draw.choice([1, outputs, outputs, 100]),
        seed=draw.getrandbits(40),
        ignore_eos=draw.random() < 0.5,
    )
    return Generate(uid, pack_ids(prompt), params, pack_ids(output), draw.choice([0, 0, 0, 1, 5]))


def _tick(event: tuple[int, Event]) -> int:
    return event[0]
