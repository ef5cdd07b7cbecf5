"""A model's chat template: it writes a conversation out as the text that the model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tpserve.errors import ModelError, RequestError

__all__ = ["ChatTemplate"]


class ChatTemplate:
    """Renders conversations, in a sandbox, with the functions and filters that Hugging Face templates expect.

    Args:
        source: the template.
        special_tokens: variables such as ``bos_token``.

    Raises:
        ModelError: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise_exception)
        self._variables = {**special_tokens, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"line {error.lineno} of the model's chat template: {error.message}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], args: Mapping[str, Any], time: float | None = None) -> str:
        """Write a conversation out, up to where the assistant's answer begins.

        Args:
            messages: objects with a role, a content and whatever else the template reads. Fields that are None are
                left out, as a template would write them as the word None.
            args: further variables of the template.
            time: what it takes for now, in seconds since 1970; None: now.

        Raises:
            RequestError: the template refuses the conversation, or cannot cope with it.
        """
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        now = (datetime.now() if time is None else datetime.fromtimestamp(time)).astimezone()
        variables = {**self._variables, "strftime_now": now.strftime, **args, "messages": present}
        try:
            return self._template.render(variables)
        except TemplateError as error:
            raise RequestError(f"the model's chat template refuses this: {error.message}", "messages") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RequestError(f"the model's chat template cannot write this: {error}", "messages") from error


class GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Put the block's content in its place."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
