"""Chat templates as Hugging Face models ship them, in a sandbox.

The environment has what such templates rely on: loop controls, `raise_exception`, `strftime_now`, and a `tojson` that
does not escape for HTML. Whatever a template raises is told to the caller as a request it cannot serve.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prfaas.errors import ConfigError, InvalidRequest
from prfaas.tokenizer.port import Message, Tool


class ChatTemplate:
    """Turns messages into the text of a prompt. `special_tokens` are visible to the template by name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = time.strftime
        self.source = source
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError("model", f"the chat template cannot be read: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), add_generation_prompt: bool = True
    ) -> str:
        try:
            return self._template.render(
                self._special_tokens,
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is foreign code
            raise InvalidRequest(f"The chat template refuses these messages: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
