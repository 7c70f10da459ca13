"""What chat templates may do."""

import pytest

from prfaas.errors import ConfigError, InvalidRequest
from prfaas.tokenizer.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "x"}]


def test_templates_have_the_helpers_they_rely_on():
    """Loop controls, JSON that is not escaped for HTML, the date, and blocks without stray line breaks."""
    source = (
        "{% for m in messages %}\n{% if m.role == 'user' %}\n"
        "{{ {'a': '<é>'} | tojson }} {{ strftime_now('%Y') | length }}\n"
        "{% break %}\n{% endif %}\n{% endfor %}\n"
    )
    assert ChatTemplate(source, {}).render([*MESSAGES, *MESSAGES]) == '{"a": "<é>"} 4\n'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_what_a_template_refuses_is_the_callers_error(source: str):
    """That includes what the sandbox does not let it do."""
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render(MESSAGES)


def test_a_broken_template_is_a_configuration_error():
    """It is found at start, not by the first request."""
    with pytest.raises(ConfigError):
        ChatTemplate("{% if %}", {})
