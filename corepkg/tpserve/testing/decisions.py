"""What a policy decides, here and in another process, where the clock, the hash seed and the process id are others.

``python -m tpserve.testing.decisions`` is that process.
"""

from __future__ import annotations

import datetime
import itertools
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Self

import msgspec
import pytest

from tpserve.api import Options, Plan, Policy, PolicySpec
from tpserve.testing.processes import PATIENCE, load
from tpserve.testing.queues import CountingView, QueueState

__all__ = ["Decided", "decide", "decided_elsewhere", "make", "see_the_same", "shift_clock"]

SHOWN = 3
"""So many steps of two plans that differ are shown."""


class Job(msgspec.Struct, frozen=True):
    """What a child decides about.

    Attributes:
        factory: ``module:Class`` of the policy.
        options_type: ``module:Class`` of its options.
        options: the options, as builtins.
        clock: seconds that the clock is ahead, or up to twice as many.
        states: what to decide about.
    """

    factory: str
    options_type: str
    options: dict[str, Any]
    clock: float
    states: list[QueueState]


def make(spec: PolicySpec, options: Options) -> Policy:
    """A new policy."""
    policy: Policy = load(spec.factory)(options)
    return policy


class Decided(msgspec.Struct, frozen=True):
    """What a policy makes of a state.

    Attributes:
        plan: of the next step.
        order: the uids of those that run; the last gives its pages up first.
    """

    plan: Plan
    order: list[int]


def decide(policy: Policy, state: QueueState) -> Decided:
    """Let a policy decide once."""
    order = sorted(state.running, key=policy.retraction_order)
    return Decided(policy.plan(CountingView(state)), [request.uid for request in order])


def see_the_same(decided: Sequence[Decided], again: Sequence[Decided], by: str, other: str) -> None:
    """See that two deciders agree, or show where they first differ."""
    differing = [pair for pair in zip(decided, again, strict=True) if pair[0] != pair[1]]
    if differing:
        pytest.fail(
            f"{by} and {other} decide differently about {len(differing)} of {len(decided)} queues, so ranks would too."
            f" In the first of these, {by} {_told(*differing[0])} where {other} {_told(*differing[0][::-1])}. What is"
            " decided must follow from the view alone: no clock, no random number, no process id, no hash() of a text,"
            " no order of a set, nothing remembered",
            pytrace=False,
        )


def _told(decided: Decided, other: Decided) -> str:
    """Where one decision begins to differ from another."""
    one, two = decided.plan, other.plan
    if one.decode != two.decode:
        return "lets the others decode" if one.decode else "lets nobody decode"
    if one != two:
        steps = [f"{prefill.tokens} tokens of request {prefill.uid}" for prefill in _rest(one.prefill, two.prefill)]
        return f"goes on with {', '.join(steps) or 'nothing more'}"
    return f"has the requests {_rest(decided.order, other.order)} give up their pages later, in this order,"


def _rest(one: Sequence[Any], two: Sequence[Any]) -> Sequence[Any]:
    """The first of what follows the beginning that two sequences have in common."""
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))
    return one[common : common + SHOWN]


def decided_elsewhere(
    spec: PolicySpec, options: Options, states: Sequence[QueueState], hash_seed: int, clock: float
) -> list[Decided]:
    """What is decided in another process.

    Args:
        spec: of the policy.
        options: for it.
        states: what to decide about.
        hash_seed: decides the order of its sets.
        clock: seconds that its clock is ahead, or up to twice as many.
    """
    options_type = f"{type(options).__module__}:{type(options).__qualname__}"
    job = Job(spec.factory, options_type, msgspec.to_builtins(options), clock, list(states))
    environ = {
        **os.environ,
        "PYTHONHASHSEED": str(hash_seed),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, "-P", "-m", "tpserve.testing.decisions"]
    done = subprocess.run(
        command, input=msgspec.json.encode(job), env=environ, stdout=subprocess.PIPE, timeout=PATIENCE, check=True
    )
    return msgspec.json.decode(done.stdout, type=list[Decided])


def shift_clock(ahead: Callable[[], float]) -> None:
    """Set the clocks that the standard library reads ahead by so many seconds, for the rest of this process.

    Those of modules ``time``, ``datetime``, ``os`` and ``resource``; not what a C library asks the kernel, nor what
    files say, nor a function that somebody has imported before.
    """
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime"):
        _shift(time, name, lambda now: now + ahead())
        _shift(time, f"{name}_ns", lambda now: now + int(ahead() * 1e9))
    _shift(os, "times", lambda now: type(now)(each + ahead() for each in now))
    _shift(resource, "getrusage", lambda now: type(now)([now[0] + ahead(), now[1] + ahead(), *now[2:]]))
    for name in ("localtime", "gmtime", "ctime"):
        _give_now(name, 0, lambda: time.time())
    _give_now("asctime", 0, lambda: time.localtime())
    _give_now("strftime", 1, lambda: time.localtime())

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Self:
            return super().now(tz) + datetime.timedelta(seconds=ahead())

        @classmethod
        def utcnow(cls) -> Self:
            return cls.now(datetime.UTC).replace(tzinfo=None)

    datetime.datetime = Shifted  # type: ignore[misc]  # date.today and datetime.today ask time.time


def _shift(module: ModuleType, name: str, shifted: Callable[[Any], Any]) -> None:
    """Have a function of a module return another time, or id."""
    clock = getattr(module, name)
    setattr(module, name, lambda *args: shifted(clock(*args)))


def _give_now(name: str, index: int, now: Callable[[], object]) -> None:
    """Have a function of ``time``, which takes a time or now as its last argument, ask us for the latter."""
    function = getattr(time, name)

    def told(*args: Any) -> Any:
        return function(*args[:index], args[index] if args[index:] and args[index] is not None else now())

    setattr(time, name, told)


def main() -> None:
    """Decide what stdin asks for."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    number = 0
    shift_clock(lambda: job.clock * (1 + number / len(job.states)))  # other in each state, whatever is made of it
    for module, name in ((os, "getpid"), (os, "getppid"), (threading, "get_native_id")):
        _shift(module, name, lambda found: found + number)
    policy: Policy = load(job.factory)(msgspec.convert(job.options, load(job.options_type)))
    decided = []
    for number, state in enumerate(job.states):  # noqa: B007 the clock reads it
        decided.append(decide(policy, state))
    sys.stdout.buffer.write(msgspec.json.encode(decided))


if __name__ == "__main__":
    main()
