"""The scheduler over a fake engine: random workloads by seed, and the cases that each rule is about."""

import itertools
import random

import msgspec
import pytest
from tests.unit.scheduler.served import Chunks, Script, Workload, expected, request, run, standing

from tpserve.api import Plan, Policy, Prefill, RankError
from tpserve.messages import Abort, Generate, Shutdown, Started
from tpserve.policies.fcfs import FcfsPolicy
from tpserve.scheduler.capacity import Capacity
from tpserve.testing.fake_engine import SMALL_LIMITS


@pytest.mark.parametrize("policy", [FcfsPolicy, Chunks])
@pytest.mark.parametrize("block", range(8))
def test_every_request_is_answered_once_and_as_if_it_were_alone(policy, block):
    for seed in range(25 * block, 25 * block + 25):
        workload = Workload(seed)
        answers, _, _ = workload.run(policy=policy)
        assert sorted(answers.finished) == [message.uid for message in workload.requests], f"seed {seed}"
        for message in workload.requests:
            tokens, reason = expected(message, workload.limits)
            found = answers.tokens[message.uid], answers.finished[message.uid]
            if message.uid in workload.aborted and found[1] == "abort":
                assert found[0] == tokens[: len(found[0])] != tokens, f"seed {seed}, request {message.uid}"
            else:
                assert found == (tokens, reason), f"seed {seed}, request {message.uid}"


def test_workloads_show_every_state(monkeypatch):
    """The test above is worth what its workloads hold."""
    seen, catch_up = set(), Capacity.catch_up

    def spy(capacity, request):
        swapped = catch_up(capacity, request)
        seen.add("caught up" if swapped else "nothing to catch up with")
        return swapped

    monkeypatch.setattr(Capacity, "catch_up", spy)
    for seed in range(100):
        workload = Workload(seed)
        answers, log, script = workload.run()
        place = {m.uid: index for index, messages in enumerate(script.given) for m in messages if type(m) is Generate}
        for index, messages in enumerate(script.given):
            for uid in [message.uid for message in messages if isinstance(message, Abort)]:
                came = "finished" if index > place[uid] else "not there yet"
                seen.add(came if script.aborted[uid] == "absent" else script.aborted[uid])
        cached = any(started.cached_tokens for output in answers.outputs for started in output.started)
        seen |= {"found cached"} if cached else set()
        seen |= {"retraction"} if log.retracted else set()
    assert seen >= {"not there yet", "queued", "mid-chunk", "decoding", "retracted", "finished"}
    assert seen >= {"mid-chunk, step under way", "decoding, step under way", "at its last token, step under way"}
    assert seen >= {"found cached", "caught up", "retraction"}


class Hunter(Script):
    """Sends requests, and an abort for the first of them that is seen in one state."""

    def __init__(self, messages, state):
        super().__init__([[message] for message in messages])
        self._uids = [message.uid for message in messages]
        self._state = state

    def _next(self, block):
        messages = super()._next(block)
        if not self.aborted:
            found = [uid for uid in self._uids if standing(self.scheduler, uid) == self._state]
            messages = messages + [Abort(uid) for uid in found[:1]]
        return messages


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(
    ("state", "overlap"),
    [
        ("queued", False),
        ("queued", True),
        ("mid-chunk", False),
        ("mid-chunk, step under way", True),
        ("decoding", False),
        ("decoding, step under way", True),
        ("at its last token, step under way", True),
        ("retracted", False),
        ("retracted", True),
    ],
)
def test_aborting_in_every_state_gives_every_page_back(state, overlap, cache):
    limits = msgspec.structs.replace(SMALL_LIMITS, pages=12)
    messages = [request(uid, [*range(10, 20), 30 + uid, 4, 4], max_tokens=20) for uid in range(6)]
    script = Hunter(messages, state)
    answers, log, _ = run(script, limits, running=3, chunk=4, overlap=overlap, cache=cache, reserve=0.0)
    assert list(script.aborted.values()) == [state]
    (victim,) = script.aborted
    assert answers.finished.pop(victim) == "abort"
    answers.tokens.pop(victim)
    others = [message for message in messages if message.uid != victim]
    assert answers.tokens == {message.uid: expected(message, limits)[0] for message in others}
    assert log.retracted


@pytest.mark.parametrize("policy", [FcfsPolicy, Chunks])
def test_equal_rounds_give_equal_decisions(policy):
    for seed in range(40):
        workload = Workload(seed)
        answers, log, script = workload.run(policy=policy)
        again, log_again, _ = workload.run(script.given[:-1], policy=policy)
        assert log.latest == log_again.latest != (-1, 0)
        assert answers.outputs == again.outputs


def test_another_order_gives_another_digest():
    _, log, _ = run([[request(1), request(2)]])
    _, other, _ = run([[request(2), request(1)]])
    assert log.latest[0] == other.latest[0]
    assert log.latest[1] != other.latest[1]


def test_how_messages_fall_into_rounds_changes_no_answer():
    for seed in range(40):
        workload = Workload(seed, aborts=False)
        answers, _, _ = workload.run()
        together, _, _ = workload.run([[m for messages in workload.rounds for m in messages]])
        assert (answers.tokens, answers.finished) == (together.tokens, together.finished)


def test_first_come_is_first_served():
    for seed in range(40):
        workload = Workload(seed, aborts=False)
        answers, _, _ = workload.run()
        arrived = [m.uid for messages in workload.rounds for m in messages if isinstance(m, Generate)]
        assert answers.started == [uid for uid in arrived if uid in answers.started]


def test_a_short_request_does_not_wait_for_a_long_one():
    answers, _, _ = run([[request(1, max_tokens=50)], [], [], [request(2, max_tokens=2)]])
    assert list(answers.finished) == [2, 1]
    assert any(output.uids == [2, 1] for output in answers.outputs)


def test_no_more_run_together_than_may():
    answers, _, _ = run([[request(uid) for uid in range(6)]], running=2)
    assert max(len(output.uids) for output in answers.outputs) == 2
    assert len(answers.finished) == 6


def test_a_prompt_longer_than_a_step_takes_several():
    answers, _, _ = run([[request(1)], [request(2, [4] * 30), request(3)]], step_tokens=10)
    assert [output.uids for output in answers.outputs[:5]] == [[1], [1], [1], [1], [2, 3, 1]]
    assert [len(answers.tokens[uid]) for uid in (1, 2, 3)] == [5, 5, 5]


def test_a_started_request_is_announced_with_its_first_token():
    answers, _, _ = run([[request(1, [4] * 9, output_ids=[8, 9])]])
    first = answers.outputs[0]
    assert first.started == [Started(1, 9, 0, output_ids=[8, 9])]
    assert first.uids == [1]
    assert all(not output.started for output in answers.outputs[1:])


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (request(1, []), "error"),
        (request(1, [4] * 65), "error"),
        (request(1, [4] * 64), "length"),
        (request(1, max_tokens=0), "length"),
        (request(1, max_tokens=2, output_ids=[5, 5]), "length"),
        (request(1, [4] * 30, max_tokens=12), "error"),
    ],
    ids=["empty", "too long", "full context", "no tokens wanted", "resumed at its end", "larger than the pool"],
)
def test_what_cannot_run_is_answered_and_the_next_is_served(message, reason):
    limits = msgspec.structs.replace(SMALL_LIMITS, pages=10)
    answers, _, _ = run([[message, request(2)]], limits)
    assert answers.finished == {1: reason, 2: "length"}
    assert answers.tokens[1] == []
    assert answers.started == [2]


def test_a_request_may_fill_the_pool_to_the_last_page():
    limits = msgspec.structs.replace(SMALL_LIMITS, pages=10)
    answers, _, _ = run([[request(1, [4] * 30, max_tokens=11)]], limits)
    assert len(answers.tokens[1]) == 11


def test_a_request_ends_where_its_context_ends():
    answers, _, _ = run([[request(1, [4] * 60, max_tokens=50)]])
    assert (len(answers.tokens[1]), answers.finished[1]) == (4, "length")


def test_a_resumed_request_goes_on_as_it_would_have():
    whole = request(1, max_tokens=20, temperature=1.0)
    tokens, _ = expected(whole, SMALL_LIMITS)
    answers, _, _ = run([[whole, request(2, max_tokens=20, temperature=1.0, seed=1, output_ids=tokens[:8])]])
    assert answers.tokens == {1: tokens, 2: tokens[8:]}


def alike(greedy):
    """Requests of all lengths, many of which begin alike, and what they get."""
    draw = random.Random(8)
    beginnings = [[draw.randrange(50) for _ in range(20)] for _ in range(3)]
    messages = []
    for uid in range(24):
        prompt = draw.choice(beginnings)[: draw.randint(1, 20)] + [
            draw.randrange(50) for _ in range(draw.randint(0, 9))
        ]
        messages.append(request(uid, prompt, draw.randint(1, 30), temperature=0.0 if greedy else 1.0))
    return messages, {message.uid: expected(message, SMALL_LIMITS)[0] for message in messages}


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("tokens", [64, 1024], ids=["tiny", "large"])
def test_no_setting_changes_what_is_said(tokens, greedy):
    messages, wanted = alike(greedy)
    rounds = [messages[:9], [], [], messages[9:]]
    settings = itertools.product([True, False], [1, 7, 0], [1, 4, 16], [True, False])
    for cache, chunk, page_size, overlap in settings:
        limits = msgspec.structs.replace(SMALL_LIMITS, page_size=page_size, pages=tokens // page_size)
        answers, log, _ = run(rounds, limits, cache=cache, chunk=chunk, overlap=overlap, reserve=0.0)
        setting = f"cache {cache}, chunk {chunk}, pages of {page_size}, overlap {overlap}"
        assert answers.tokens == wanted, setting
        assert bool(log.retracted) == (tokens == 64), setting
        found = sum(started.cached_tokens for output in answers.outputs for started in output.started)
        if page_size < 16 or not cache:
            assert bool(found) == cache, setting


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_next_turn_of_a_chat_finds_prompt_and_answer_cached(page_size, overlap):
    limits = msgspec.structs.replace(SMALL_LIMITS, page_size=page_size)
    first = request(1, [4] * 10, max_tokens=9)
    answer, _ = expected(first, limits)
    chat = [4] * 10 + answer
    answers, _, _ = run([[first], *[[]] * 12, [request(2, [*chat, 30, 31])]], limits, overlap=overlap)
    (started,) = answers.outputs[-5].started
    computed = len(chat) - 1  # Nobody needed the keys and values of the last token.
    assert started == Started(2, len(chat) + 2, computed // page_size * page_size)


def test_two_that_come_together_compute_what_is_common_once():
    prompt = [*range(10, 30)]
    answers, _, script = run([[request(1, prompt, 2), request(2, prompt, 2), request(3, [*prompt[:9], 4], 2)]])
    started = [entry for output in answers.outputs for entry in output.started]
    assert started == [Started(1, 20, 0), Started(2, 20, 16), Started(3, 10, 8)]
    assert len(script.given) == 3


def test_a_long_prompt_goes_in_chunks_beside_others():
    answers, _, _ = run([[request(1, [4] * 30)], [request(2)]], chunk=7)
    assert [output.uids for output in answers.outputs[:6]] == [[], [2], [2], [2], [1, 2], [2, 1]]


def test_an_abort_that_comes_first_is_remembered_once():
    answers, _, _ = run([[Abort(1)], [request(1), request(2)]])
    assert answers.finished == {1: "abort", 2: "length"}
    assert answers.started == [2]
    answers, _, _ = run([[Abort(1)], [request(1)]])
    assert answers.outputs[0].tokens == [-1]


def test_an_abort_in_the_round_of_its_request():
    answers, _, _ = run([[request(1), Abort(1), request(2)]])
    assert answers.finished == {1: "abort", 2: "length"}


def test_a_uid_that_is_taken_stops_the_rank():
    with pytest.raises(RankError, match="rank 0, round 1: expected a new uid, found 7, which is taken"):
        run([[request(7)], [request(7)]])


def test_shutdown_ends_everything_in_its_round():
    answers, log, _ = run([[request(1)], [], [Shutdown(), request(2)]], running=1)
    assert answers.finished == {1: "abort", 2: "abort"}
    assert log.latest[0] == answers.outputs[-1].round == 2


def test_each_tokenizer_says_shutdown():
    answers, _, _ = run([[Shutdown(), request(1)], [], [Shutdown()]], shutdowns=2)
    assert answers.finished == {1: "abort"}
    assert len(answers.tokens[1]) == 2


def plans(*prefill, decode=True):
    class Fixed(Policy):
        def plan(self, view):
            return Plan(prefill, decode) if view.num_waiting else Plan()

    return Fixed


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (plans(Prefill(9, 3)), "living requests, found request 9"),
        (plans(Prefill(3, 3), Prefill(3, 3)), "each request once, found request 3 twice"),
        (plans(Prefill(3, 4)), "1 to 3 tokens of request 3, found 4"),
        (plans(Prefill(3, 0)), "1 to 3 tokens of request 3, found 0"),
        (plans(Prefill(3, 3), Prefill(4, 3), Prefill(5, 3)), "at most 2 running requests, found 3"),
        (plans(Prefill(6, 1), Prefill(3, 1)), "at most 4 pages, found 5"),
        (plans(Prefill(3, 3), Prefill(5, 8)), "at most 10 tokens, found 11"),
        (plans(), "something to compute for 4 requests, found nothing"),
    ],
)
def test_a_policy_that_breaks_its_limits_is_named(policy, message):
    limits = msgspec.structs.replace(SMALL_LIMITS, pages=4)
    requests = [request(3, max_tokens=8), request(4), request(5, [4] * 8), request(6, [4] * 13, max_tokens=3)]
    with pytest.raises(RankError, match=rf"rank 0, round 0: expected policy plans\.<locals>\.Fixed to plan {message}"):
        run([requests], limits, policy, running=2, step_tokens=10)


class Raises(FcfsPolicy):
    def plan(self, view):
        raise ZeroDivisionError("no plan")


class CannotLetGo(FcfsPolicy):
    def retraction_order(self, request):
        raise KeyError(request.uid)


@pytest.mark.parametrize(
    ("policy", "found"),
    [(Raises, "ZeroDivisionError: no plan"), (CannotLetGo, "KeyError: ")],
)
def test_a_policy_that_fails_is_named(policy, found):
    limits = msgspec.structs.replace(SMALL_LIMITS, pages=10)
    requests = [request(uid, [uid] * 8, max_tokens=20) for uid in range(5)]
    with pytest.raises(RankError, match=f"expected policy {policy.__name__} to decide, found {found}"):
        run([requests], limits, policy, reserve=0.0)


def test_an_idle_rank_decides_nothing():
    _, log, script = run([[Abort(3)]])
    assert script.given == [[Abort(3)], [Shutdown()]]
    assert log.latest[0] == 1
