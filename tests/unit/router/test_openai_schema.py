"""Bodies of the OpenAI API: what is understood, and what is refused with which `param`."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import InvalidRequest
from services.router.openai.schema import Body, ChatBody, CompletionBody, decode_body

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TEXT = {"model": "m", "prompt": "x"}


def chat(**fields: Any) -> ChatBody:
    return decode_body(json.dumps(CHAT | fields).encode(), ChatBody)


def text(**fields: Any) -> CompletionBody:
    return decode_body(json.dumps(TEXT | fields).encode(), CompletionBody)


MESSAGE = {"role": "user", "content": "x"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": 1}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    ({"messages": [MESSAGE | {"tool_calls": [{}]}]}, "messages"),
    ({"messages": [MESSAGE | {"what": 1}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"what": 1}}, "stream_options"),
    ({"n": 129}, "n"),
    ({"n": 0}, "n"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 0}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"presence_penalty": 0.1}, "presence_penalty"),
    ({"frequency_penalty": -1}, "frequency_penalty"),
    ({"logit_bias": {"1": 2}}, "logit_bias"),
    ({"store": True}, "store"),
    ({"tools": {"type": "function"}}, "tools"),
    ({"tool_choice": 1}, "tool_choice"),
    ({"response_format": "json"}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"top_k": 40}, "top_k"),
    ({"min_p": 0.1}, "min_p"),
    ({"no_such_thing": 3}, "no_such_thing"),
    ({"a.b[0]": 3}, "a.b[0]"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], param: str):
    """Never ignored: an answer that looks right but is not what was asked for is worse than none."""
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 0, "echo": True}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"echo": 1}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"max_completion_tokens": 4}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
    ],
)
def test_completions_refuse_what_is_theirs(fields: dict[str, Any], param: str):
    """Fields of chat are unknown here."""
    with pytest.raises(InvalidRequest) as caught:
        text(**fields)
    assert caught.value.param == param


def test_values_that_ask_for_nothing_are_accepted():
    """Clients and load generators send defaults along, or null, or an earlier answer's message as it was."""
    answer = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": None}
    chat(
        messages=[{"role": "system", "content": [{"type": "text", "text": "x"}]}, answer, MESSAGE | {"name": "bob"}],
        n=1, logprobs=False, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, store=False, tools=[],
        tool_choice="auto", parallel_tool_calls=True, response_format={"type": "text"}, service_tier="auto",
        user="u", metadata={"a": "b"}, prompt_cache_key="k", safety_identifier="s", stop=[], ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )  # fmt: skip
    nothing = dict.fromkeys(set(ChatBody.__struct_fields__) - {"model", "messages"})
    assert chat(**nothing) == chat()
    text(best_of=1, echo=False, suffix="", logprobs=None, min_p=0, min_tokens=0, repetition_penalty=1, top_k=-1)


MALFORMED = [
    b"", b"{", b"[]", b"null", b'"x"', b"{}", b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"model":"\xff"}', b"{" * 100_000,
    b'{"model":"\\ud800","messages":[]}', b'{"model":"\\udc00","messages":[]}', b'{"model":"m","temperature":NaN}',
    b'{"model":"m","seed":1e999}', b'{"tools":' + b"[" * 100_000, b'{"tools":' + b'{"a":' * 100_000,
    b'{"model":"m","messages":[{"role":"user","content":"x"}]} trailing',
]  # fmt: skip


@pytest.mark.parametrize("body", MALFORMED)
def test_malformed_bodies_are_refused(body: bytes):
    """Also those that would exhaust the stack."""
    with pytest.raises(InvalidRequest):
        decode_body(body, ChatBody)


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(field=st.sampled_from([*ChatBody.__struct_fields__, "x`y - at `$.z`"]), value=JSON, kind=st.sampled_from([0, 1]))
def test_any_value_of_any_field_is_understood_or_refused(field: str, value: Any, kind: int):
    """No other exception comes out, whatever comes in."""
    base, body_type = ((CHAT, ChatBody), (TEXT, CompletionBody))[kind]
    with contextlib.suppress(InvalidRequest):
        body: Body = decode_body(json.dumps(base | {field: value}).encode(), body_type)
        assert field in body.__struct_fields__
