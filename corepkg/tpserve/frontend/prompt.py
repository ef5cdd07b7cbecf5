"""From what a client writes to tokens, the same for every way in."""

from __future__ import annotations

from tpserve.errors import RequestError
from tpserve.frontend.fit import check_length
from tpserve.frontend.text import TextCodec
from tpserve.messages import ChatPrompt
from tpserve.step import EngineLimits
from tpserve.values import is_text

__all__ = ["encode_prompt"]


def encode_prompt(codec: TextCodec, prompt: str | ChatPrompt, limits: EngineLimits, field: str) -> list[int]:
    """The tokens of a text or a conversation.

    Args:
        codec: the model's tokenizer.
        prompt: what to encode.
        limits: what it must fit into. What is too long whatever its tokens are is refused at once: megabytes take long.
        field: names the prompt in errors.

    Raises:
        RequestError: it is no text or too long, or the model has no chat template, or the template refuses the
            conversation.
    """
    if isinstance(prompt, ChatPrompt):
        text, is_chat = codec.render(prompt.messages, prompt.time, **prompt.template_args), True
    else:
        text, is_chat = prompt, False
    if not is_text(text):
        raise RequestError("the text has a lone surrogate, which is no character", field)
    if len(text) >= min(limits.max_context, limits.pages * limits.page_size):
        check_length(codec.least_tokens(text), limits, field, "at least ")
    return codec.encode(text, special_tokens=not is_chat)
