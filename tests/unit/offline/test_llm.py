"""The offline engine over a fake one: order, texts, stop strings, errors, and what is left behind."""

import gc
import threading

import pytest

import tpserve
from tpserve.config import ServeConfig
from tpserve.errors import Closed, ConfigError, RequestError
from tpserve.messages import Abort, ChatPrompt, Generate, SamplingParams
from tpserve.offline import PromptError
from tpserve.offline.running import plan_engine
from tpserve.testing.fake_engine import FakeEngine, continuation
from tpserve.testing.models import make_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def alone(prompt: list[int], params: SamplingParams, limits) -> list[int]:
    return continuation(prompt, params, params.max_tokens, limits)


def test_completions_come_in_order_with_texts_and_tokens(make_llm):
    llm, engine = make_llm()
    prompts = ["one", [7, 8, 9], "three, which is longer"]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (30, 1, 5)]
    completions = llm.generate(prompts, params)
    assert [completion.index for completion in completions] == [0, 1, 2]
    for prompt, own, completion in zip(prompts, params, completions, strict=True):
        tokens = engine.codec.encode(prompt) if isinstance(prompt, str) else prompt
        assert completion.token_ids == alone(tokens, own, engine.limits)
        assert completion.text == engine.codec.decode(completion.token_ids)
        assert (completion.finish_reason, completion.prompt_tokens) == ("length", len(tokens))


def test_more_prompts_than_run_together(make_llm):
    llm, engine = make_llm()
    prompts = [[token] * 3 for token in range(40)]
    seen = []
    completions = llm.generate(prompts, GREEDY, progress=lambda done, total: seen.append((done, total)))
    assert [c.token_ids for c in completions] == [alone(prompt, GREEDY, engine.limits) for prompt in prompts]
    assert seen == [(done, 40) for done in range(1, 41)]


def test_no_prompts_no_completions(make_llm):
    llm, _ = make_llm()
    assert llm.generate([]) == []
    assert llm.generate([], []) == []


def test_an_end_of_text_token_is_counted_and_is_no_text(make_llm):
    llm, engine = make_llm()
    params = SamplingParams(temperature=0.0, max_tokens=120)
    prompt = next(p for p in ([n, 3] for n in range(256)) if 255 in alone(p, params, engine.limits)[:60])
    (completion,) = llm.generate([prompt], params)
    assert completion.finish_reason == "stop"
    assert completion.token_ids[-1] == 255
    assert completion.text == engine.codec.decode(completion.token_ids[:-1])


def test_a_stop_string_ends_the_text_before_it_and_aborts_the_request(make_llm):
    llm, engine = make_llm()
    prompt = [5, 6, 7]
    tokens = alone(prompt, GREEDY, engine.limits)
    text = engine.codec.decode(tokens)
    stop = text[3:6]
    completions = llm.generate([prompt, [9]], [tpserve.SamplingParams(temperature=0.0, stop=(stop,)), GREEDY])
    assert completions[0].finish_reason == "stop"
    assert completions[0].text == text[: text.index(stop)]
    assert completions[0].token_ids == tokens[: len(completions[0].token_ids)]
    assert len(completions[0].token_ids) < len(tokens)
    assert completions[1].token_ids == alone([9], GREEDY, engine.limits)
    assert [type(m) for m in engine.seen] == [Generate, Generate, Abort]
    assert llm.generate([prompt], GREEDY)[0].token_ids == tokens


def test_seeds_are_drawn_where_none_is_given(make_llm):
    llm, engine = make_llm()
    sampled = SamplingParams(max_tokens=20, ignore_eos=True)
    first, second = llm.generate([[5, 6]] * 2, sampled)
    assert first.token_ids != second.token_ids
    assert {m.params.seed for m in engine.seen} != {None}
    seeded = SamplingParams(max_tokens=20, ignore_eos=True, seed=4)
    assert len({tuple(c.token_ids) for c in llm.generate([[5, 6]] * 3, seeded)}) == 1


def test_without_a_limit_a_completion_fills_the_context(make_llm):
    llm, engine = make_llm()
    (completion,) = llm.generate([[5, 6]], SamplingParams(temperature=0.0, ignore_eos=True))
    assert 2 + len(completion.token_ids) == engine.limits.max_context


def test_a_temperature_close_to_zero_is_greedy(make_llm):
    llm, engine = make_llm()
    llm.generate([[5]], SamplingParams(temperature=1e-6, max_tokens=1))
    assert engine.seen[0].params.temperature == 0.0


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", GREEDY, r"prompts\[1\]: the prompt is empty"),
        ([], GREEDY, r"prompts\[1\]: the prompt is empty"),
        ([256], GREEDY, r"prompts\[1\]: token ids must be from 0 to 255"),
        ([1] * 200, GREEDY, r"prompts\[1\]: the prompt has 200 tokens; the context holds 200"),
        ([1] * 190, GREEDY, r"prompts\[1\]: 190 tokens of prompt and 20 of output exceed the context of 200"),
        (["a"], GREEDY, r"prompts\[1\]: neither a text, nor token ids, nor a ChatPrompt"),
        (ChatPrompt([{"role": "user"}]), GREEDY, r"prompts\[1\]: this model has no chat template"),
        ("\ud800", GREEDY, r"prompts\[1\]: the text has a lone surrogate"),
        (ChatPrompt("hi"), GREEDY, r"prompts\[1\]: neither a text, nor token ids, nor a ChatPrompt"),
        ([1], {"max_tokens": 3}, r"prompts\[1\]: expected SamplingParams, found {'max_tokens': 3}"),
        ([1], SamplingParams(stop=("\ud800",)), r"prompts\[1\]: sampling parameters: a stop text has a lone surrogate"),
        ([1], SamplingParams(top_k=1 << 31), r"prompts\[1\]: sampling parameters: .*top_k"),
        ([1], SamplingParams(top_p=1.5), r"prompts\[1\]: sampling parameters: .*top_p"),
        ([1], SamplingParams(stop="text"), r"prompts\[1\]: sampling parameters: .*stop"),
    ],
)
def test_a_wrong_prompt_is_named_and_nothing_is_computed(make_llm, prompt, params, message):
    llm, engine = make_llm()
    with pytest.raises(PromptError, match=message) as caught:
        llm.generate([[5], prompt], [GREEDY, params])
    assert caught.value.index == 1
    assert engine.seen == []
    assert len(llm.generate([[5]], GREEDY)) == 1


def test_prompts_and_params_must_match(make_llm):
    llm, _ = make_llm()
    with pytest.raises(RequestError, match="2 prompts and 1 params"):
        llm.generate([[5], [6]], [GREEDY])
    for prompts in ("text", None):
        with pytest.raises(TypeError, match="must be a list"):
            llm.generate(prompts)
    for params in ({"max_tokens": 3}, 3):
        with pytest.raises(TypeError, match="params must be SamplingParams, or a list of one for each prompt, not "):
            llm.generate([[5]], params)


def test_completions_can_be_had_as_they_finish_and_the_rest_is_aborted(make_llm):
    llm, engine = make_llm()
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (150, 1, 150)]
    completions = llm.as_completed([[5], [6], [7]], params)
    assert next(completions).index == 1
    with pytest.raises(RuntimeError, match="busy"):
        llm.generate([[5]], GREEDY)
    completions.close()
    assert engine.seen[3:] == [Abort(0), Abort(2)]
    assert llm.generate([[8]], GREEDY)[0].token_ids == alone([8], GREEDY, engine.limits)


def test_an_interrupted_call_leaves_an_engine_that_works(make_llm):
    llm, engine = make_llm()

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5], [6]], [GREEDY, SamplingParams(max_tokens=100, ignore_eos=True)], progress=interrupt)
    assert engine.seen[-1] == Abort(1)
    assert len(llm.generate([[5]], GREEDY)) == 1


def test_a_failing_engine_raises_where_its_output_is_awaited(make_llm):
    class Broken(FakeEngine):
        def launch(self, step):
            raise MemoryError("no room")

    llm, _ = make_llm(Broken())
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room"):
            llm.generate([[5]], SamplingParams(max_tokens=2))
    llm.close()


def test_close_ends_the_thread_and_the_engine(make_llm):
    llm, engine = make_llm()
    llm.generate([[5]], GREEDY)
    with llm:
        pass
    llm.close()
    assert engine.closed_in_order
    assert engine.engine._closed
    assert not any(thread.name == "tpserve-rank0" for thread in threading.enumerate())
    with pytest.raises(Closed, match="has been shut down"):
        llm.generate([[5]], GREEDY)


def test_close_while_completions_are_awaited(make_llm):
    llm, engine = make_llm()
    completions = llm.as_completed([[5], [6]], [GREEDY, SamplingParams(max_tokens=150, ignore_eos=True)])
    next(completions)
    llm.close()
    assert engine.closed_in_order
    with pytest.raises(Closed):
        next(completions)


def test_an_llm_that_is_dropped_is_closed(make_llm):
    llm, engine = make_llm()
    dropped = type(llm)()
    del dropped
    gc.collect()
    assert engine.closed_in_order


def test_settings_are_checked_and_named_as_python_names_them():
    with pytest.raises(ConfigError, match="max_running_requests: expected an integer"):
        tpserve.LLM(max_running_requests="many")
    with pytest.raises(ConfigError, match="no_such: there is no such setting"):
        tpserve.LLM(no_such=1)
    with pytest.raises(ConfigError, match="options: expected a mapping, found 3"):
        tpserve.LLM(options=3)


def test_a_context_beyond_the_model_s_is_told(tmp_path, caplog):
    folder = make_model(tmp_path / "model")
    limit = plan_engine(ServeConfig(model=str(folder), max_context=64)).model.max_context
    assert caplog.messages == []
    plan_engine(ServeConfig(model=str(folder), max_context=limit + 1))
    assert caplog.messages == [f"the context is the model's {limit} tokens, below the {limit + 1} asked for"]
