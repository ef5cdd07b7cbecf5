"""What fits into an engine, to the token."""

import pytest

from tpserve.errors import RequestError
from tpserve.frontend.fit import fit
from tpserve.step import EngineLimits


def limits(pages: int) -> EngineLimits:
    return EngineLimits(pages=pages, page_size=4, slots=2, max_context=40, vocab_size=9, eos_ids=())


@pytest.mark.parametrize(("pages", "room"), [(100, 40), (10, 40), (9, 36)])
def test_prompt_and_output_share_the_context_or_the_pool_whichever_is_smaller(pages, room):
    assert fit([1] * 30, room - 30, limits(pages), "prompt") == room - 30
    assert fit([1] * 30, None, limits(pages), "prompt") == room - 30
    with pytest.raises(RequestError, match=f"30 tokens of prompt and {room - 29} of output exceed") as caught:
        fit([1] * 30, room - 29, limits(pages), "prompt")
    assert caught.value.param == "max_tokens"
    assert caught.value.code == ("kv_pool_exceeded" if pages == 9 else "context_length_exceeded")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([], "is empty"), ([1, 9], "from 0 to 8"), ([-1], "from 0 to 8"), ([1] * 40, "context holds 40")],
)
def test_a_prompt_that_cannot_be_served_is_named(tokens, message):
    with pytest.raises(RequestError, match=message) as caught:
        fit(tokens, None, limits(100), "messages")
    assert caught.value.param == "messages"


def test_a_prompt_may_be_longer_than_the_pool():
    with pytest.raises(RequestError, match="the KV pool holds 36"):
        fit([1] * 36, None, limits(9), "prompt")
