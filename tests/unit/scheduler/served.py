"""A scheduler over a fake engine that serves scripts of messages, and random workloads by seed."""

import random

import msgspec
from tests.unit.scheduler.sample import Decisions

from tpserve.api import Plan, Policy, Prefill
from tpserve.messages import Abort, Generate, SamplingParams, Shutdown, StepOutput
from tpserve.policies.fcfs import FcfsPolicy
from tpserve.policies.options import BatchingOptions
from tpserve.scheduler.queues import NO_SLOT
from tpserve.scheduler.replies import LocalReplies
from tpserve.scheduler.round import Round, RoundSource
from tpserve.scheduler.scheduler import Budget, Scheduler
from tpserve.step import EngineLimits
from tpserve.testing.fake_engine import SMALL_LIMITS, FakeEngine, continuation
from tpserve.tokens import pack_ids, unpack_ids

MAX_ROUNDS = 5_000
SMALL_BUDGET = Budget(running=8, step_tokens=64)


def standing(scheduler: Scheduler, uid: int) -> str:
    """Where a request stands between two rounds."""
    request = scheduler.queues.get(uid)
    if request is None:
        return "absent"
    if request.slot == NO_SLOT:
        return "retracted" if request.has_started else "queued"
    place = "mid-chunk" if request.pending else "decoding" if uid in scheduler.queues.decoding else "at its last token"
    return place + ", step under way" * any(request in each.batch.requests for each in scheduler._under_way)


class Script(RoundSource):
    """Gives out prepared rounds, then empty ones while there is work, then a Shutdown. Checks the pages each round.

    Attributes:
        given: the messages of each round.
        aborted: where each request stood when its abort came.
    """

    def __init__(self, rounds):
        self.rounds = list(rounds)
        self.given = []
        self.aborted = {}
        self.scheduler = None

    def receive(self, block):
        assert len(self.given) < MAX_ROUNDS, "the workload never ends"
        self.scheduler.check()
        messages = self._next(block)
        self.aborted |= {each.uid: standing(self.scheduler, each.uid) for each in messages if isinstance(each, Abort)}
        self.given.append(messages)
        return Round(len(self.given) - 1, messages)

    def _next(self, block):
        while self.rounds:
            messages = self.rounds.pop(0)
            if messages or not block:
                return messages
        return [Shutdown()] if block else []

    def close(self):
        pass


class Answers:
    """All outputs, gathered by request."""

    def __init__(self):
        self.outputs: list[StepOutput] = []
        self.started: list[int] = []
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, str] = {}

    def add(self, output: StepOutput):
        assert not self.outputs or output.round > self.outputs[-1].round
        assert output.uids or output.started
        self.outputs.append(output)
        self.started += [entry.uid for entry in output.started]
        for uid, token, reason in zip(output.uids, output.tokens, output.finished, strict=True):
            assert uid not in self.finished, f"request {uid} answered after its finish"
            assert token == -1 or uid in self.started
            assert token != -1 or reason
            self.tokens.setdefault(uid, []).extend([token] * (token != -1))
            if reason:
                self.finished[uid] = reason


class Chunks(Policy):
    """Takes prompts in small pieces, the youngest first, and leaves the decoding out now and then; yet it is pure."""

    def plan(self, view):
        limits = view.limits
        left, rows, pages, prefill = limits.tokens, limits.running - view.num_running, limits.free_pages, []
        decode = bool(view.num_waiting % 3) or not view.num_waiting
        left -= view.num_decoding * decode
        for request in view.running():
            if request.pending and left:
                prefill.append(Prefill(request.uid, min(left, request.pending, limits.chunk, 1 + request.length % 3)))
                left -= prefill[-1].tokens
        for request in reversed(list(view.waiting())):
            rows, pages = rows - 1, pages - request.pages
            if rows < 0 or pages < 0 or not left:
                break
            prefill.append(Prefill(request.uid, min(left, request.tokens, limits.chunk, 2)))
            left -= prefill[-1].tokens
        return Plan(tuple(prefill), decode or not prefill)


def run(script, limits=SMALL_LIMITS, policy=FcfsPolicy, budget=SMALL_BUDGET, shutdowns=1, reserve=0.5, **changes):
    """Serve a script, or a list of rounds, to its end; answers, decisions, and the script."""
    source = script if isinstance(script, Script) else Script(script)
    answers, log = Answers(), Decisions(0)
    scheduler = Scheduler(
        source,
        LocalReplies(answers.add),
        FakeEngine(limits),
        policy(BatchingOptions(reserve=reserve)),
        log,
        msgspec.structs.replace(budget, **changes),
        shutdowns,
    )
    source.scheduler = scheduler
    scheduler.run()
    scheduler.check()
    assert scheduler.capacity.available == limits.pages, "pages are held for nobody"
    return answers, log, source


def request(uid, prompt=(5, 6, 7), max_tokens=5, output_ids=(), priority=0, **params):
    sampling = {"temperature": 0.0, "seed": uid, "ignore_eos": True, **params}
    return Generate(
        uid, pack_ids(prompt), SamplingParams(max_tokens=max_tokens, **sampling), pack_ids(output_ids), priority
    )


def expected(message: Generate, limits: EngineLimits) -> tuple[list[int], str]:
    """What a request gets that nobody aborts."""
    params, prompt = message.params, unpack_ids(message.prompt_ids + message.output_ids)
    limit = min(len(unpack_ids(message.prompt_ids)) + params.max_tokens, limits.max_context)
    drawn = continuation(prompt, params, limit - len(prompt), limits)
    for index, token in enumerate(drawn):
        if token in limits.eos_ids and not params.ignore_eos:
            return drawn[: index + 1], "stop"
    return drawn, "length"


class Workload:
    """Random requests, aborts and limits; everything follows from the seed."""

    def __init__(self, seed: int, aborts: bool = True):
        draw = random.Random(seed)
        page_size = draw.choice([1, 3, 4, 16])
        self.limits = EngineLimits(
            pages=-(-48 // page_size) + draw.randrange(60 // page_size + 1),
            page_size=page_size,
            slots=draw.randint(1, 9),
            max_context=40,
            vocab_size=draw.choice([10, 50, 1000]),
            eos_ids=draw.choice([(), (1,), (1, 2)]),
        )
        self.budget = Budget(
            running=draw.randint(1, 12),
            step_tokens=draw.choice([1, 7, 30, 200]),
            chunk=draw.choice([0, 0, 1, 7]),
            cache=draw.random() < 0.7,
            overlap=draw.random() < 0.6,
        )
        self.reserve = draw.choice([0.0, 0.0, 0.5, 1.0])
        self.beginnings = [[draw.randrange(self.limits.vocab_size) for _ in range(12)] for _ in range(3)]
        self.requests = [self._request(uid, draw) for uid in range(draw.randint(1, 30))]
        last = draw.choice([1, 5, 80])
        self.rounds = [[] for _ in range(last + 20)]
        self.aborted: set[int] = set()
        for message in self.requests:
            self.rounds[draw.randrange(last)].append(message)
        if aborts:
            for message in self.requests:
                if draw.random() < 0.4:
                    self.aborted.add(message.uid)
                    self.rounds[draw.randrange(last + 20)].insert(0, Abort(message.uid))

    def _request(self, uid, draw):
        prompt = draw.choice(self.beginnings)[: draw.randint(0, 12)]
        prompt = prompt + [draw.randrange(self.limits.vocab_size) for _ in range(draw.randint(1, 8))]
        output = [draw.randrange(3, self.limits.vocab_size) for _ in range(draw.choice([0, 0, 0, 4]))]
        return request(
            uid,
            prompt,
            draw.choice([5, 12, 100]),
            output,
            temperature=draw.choice([0.0, 0.7]),
            seed=draw.randrange(1 << 40),
            ignore_eos=draw.random() < 0.5,
        )

    def run(self, rounds=None, **options):
        return run(
            self.rounds if rounds is None else rounds,
            self.limits,
            budget=options.pop("budget", self.budget),
            reserve=self.reserve,
            **options,
        )
