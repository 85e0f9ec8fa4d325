"""Conversations in every usual format, and samples that are none."""

import json
from typing import Any

import pytest

from forebay.chat.conversations import (
    BadConversation,
    Conversation,
    FieldNames,
    read_conversation,
    without_thinking,
)

ASKED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
DEEP = json.loads("[" * 80 + "]" * 80)


def read(record: Any, **names: Any) -> Conversation:
    return read_conversation(json.dumps(record), FieldNames(**names))


@pytest.mark.parametrize(
    "record",
    [
        {"messages": ASKED},
        {"conversations": ASKED},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"messages": [{"from": "user", "value": "Hi"}, {"from": "model", "value": "Hello"}]},
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": ASKED[:1], "completion": ASKED[1:]},
        {"instruction": "Hi", "input": "", "output": "Hello"},
        {"instruction": "Hi", "output": "Hello", "extra": 1},
        {
            "messages": [
                {**ASKED[0], "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
                ASKED[1],
            ]
        },
    ],
)
def test_every_format_is_recognized_by_its_fields(record: dict[str, Any]) -> None:
    assert read(record).messages == ASKED


def test_a_sample_may_be_bytes_text_or_an_object() -> None:
    for data in (json.dumps({"messages": ASKED}), json.dumps({"messages": ASKED}).encode(), {"messages": ASKED}):
        assert read_conversation(data, FieldNames()).messages == ASKED


def test_fields_and_roles_can_be_named() -> None:
    record = {"dialog": [{"role": "pupil", "content": "Hi"}, {"role": "teacher", "content": "Hello"}]}
    roles = (("pupil", "user"), ("teacher", "assistant"))
    assert read(record, messages="dialog", roles=roles).messages == ASKED
    assert read({"q": "Hi", "a": "Hello"}, prompt="q", completion="a").messages == ASKED
    numbered = {"messages": [{**message, "role": number} for number, message in enumerate(ASKED)]}
    assert read(numbered, roles=(("0", "user"), ("1", "assistant"))).messages == ASKED


def test_instructions_have_input_history_and_a_system_prompt() -> None:
    record = {"system": "Be brief.", "history": [["1", "2"]], "instruction": "Add", "input": "3 4", "output": "7"}
    contents = [(each["role"], each["content"]) for each in read(record).messages]
    assert contents == [
        ("system", "Be brief."), ("user", "1"), ("assistant", "2"), ("user", "Add\n\n3 4"), ("assistant", "7"),
    ]  # fmt: skip


def test_a_system_prompt_beside_messages_comes_first_unless_they_have_one() -> None:
    assert read({"system": "S", "messages": ASKED}).messages[0] == {"role": "system", "content": "S"}
    own = [{"role": "system", "content": "own"}, *ASKED]
    assert read({"system": "S", "messages": own}).messages == own


def test_arguments_of_tool_calls_are_objects_whether_they_came_as_json_or_not() -> None:
    for arguments in ({"city": "Köln"}, '{"city": "Köln"}'):
        for call in (
            {"id": "1", "type": "function", "function": {"name": "w", "arguments": arguments}},
            {"id": "1", "name": "w", "arguments": arguments},
        ):
            messages = [ASKED[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
            found = read({"messages": messages}).messages[1]
            assert found["content"] == ""
            assert found["tool_calls"][0]["function"] == {"name": "w", "arguments": {"city": "Köln"}}


def test_a_function_call_of_sharegpt_is_a_tool_call() -> None:
    record = {
        "conversations": [
            {"from": "human", "value": "Weather?"},
            {"from": "function_call", "value": '{"name": "w", "arguments": {}}'},
            {"from": "observation", "value": "cold"},
            {"from": "gpt", "value": "Cold."},
        ],
        "tools": '[{"name": "w"}]',
    }
    found = read(record)
    assert [message["role"] for message in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1]["tool_calls"][0]["function"]["name"] == "w"
    assert found.tools == [{"name": "w"}]


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thinking_is_passed_under_every_name_that_templates_read(name: str) -> None:
    found = read({"messages": [ASKED[0], {**ASKED[1], name: "hm"}]}).messages[1]
    assert (found["reasoning_content"], found["thinking"], found["reasoning"]) == ("hm", "hm", "hm")


def test_thinking_can_be_dropped_from_fields_and_contents() -> None:
    messages = [ASKED[0], {"role": "assistant", "content": "<think>hm</think>\n\nHello", "thinking": "hm"}]
    assert without_thinking(read({"messages": messages})).messages == ASKED


def test_messages_after_the_last_answer_are_left_out() -> None:
    assert read({"messages": [*ASKED, {"role": "user", "content": "And?"}]}).messages == ASKED


@pytest.mark.parametrize(
    ("record", "reason", "said"),
    [
        ([1], "not-a-record", "must be an object"),
        ({"text": "Hi"}, "no-messages", "it has text"),
        ({"messages": []}, "empty", "no message"),
        ({"messages": "Hi"}, "no-messages", "it has none of the fields"),
        ({"messages": ASKED[:1]}, "no-response", "no assistant message (roles: user); the last message is 'Hi'"),
        (
            {"messages": [{"role": "alien", "content": "x"}, *ASKED]},
            "unknown-role",
            "message 0, 'x', has the role 'alien'",
        ),
        ({"messages": ["Hi", *ASKED]}, "bad-message", "message 0 is str"),
        ({"messages": [{"content": "x"}, *ASKED]}, "bad-message", "message 0 has no 'role'"),
        ({"messages": [{"role": "user", "content": 7}, *ASKED]}, "not-text", "the content of message 0 is int"),
        ({"messages": [{"role": "user", "content": None}, *ASKED]}, "not-text", "message 0 is NoneType"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, *ASKED]},
            "not-text",
            "message 0 has parts that are not text",
        ),
        ({"messages": [{**ASKED[0], "tool_calls": [{"name": "w"}]}, ASKED[1]]}, "bad-message", "its role is user"),
        ({"messages": [ASKED[0], {**ASKED[1], "tool_calls": [{}]}]}, "bad-tool-call", "names no function"),
        ({"messages": [ASKED[0], {**ASKED[1], "tool_calls": "w()"}]}, "bad-tool-call", "message 1 are str, not a list"),
        (
            {"messages": [ASKED[0], {**ASKED[1], "tool_calls": {"name": "w", "arguments": "{no"}}]},
            "bad-tool-call",
            "JSON text of a tool call cannot be read",
        ),
        ({"messages": [ASKED[0], {**ASKED[1], "tool_calls": DEEP}]}, "too-deep", "the tool calls of message 1"),
        (
            {
                "messages": [
                    ASKED[0],
                    {**ASKED[1], "tool_calls": {"name": "w", "arguments": f'{{"a": {json.dumps(DEEP)}}}'}},
                ]
            },
            "too-deep",
            "more than 64 deep",
        ),
        ({"messages": [ASKED[0], {**ASKED[1], "thinking": 7}]}, "not-text", "the thinking of message 1 is int"),
        ({"messages": ASKED * 2049}, "too-long", "it has 4,098 messages; at most 4,096 are read"),
        ({"messages": ASKED, "tools": DEEP}, "too-deep", "the tools: "),
        ({"messages": ASKED, "tools": "[1]"}, "bad-tools", "must be a list of objects"),
        ({"prompt": 1, "completion": "x"}, "bad-message", "the user's part is int"),
        ({"instruction": "a", "output": 1}, "not-text", "must be texts"),
        ({"instruction": "a", "output": "b", "history": [["x"]]}, "bad-message", "list of pairs"),
    ],
)
def test_a_sample_that_is_no_conversation_says_why(record: Any, reason: str, said: str) -> None:
    with pytest.raises(BadConversation, match=r".") as caught:
        read(record)
    assert caught.value.reason == reason
    assert said in caught.value.detail


def test_json_that_nests_too_deeply_to_be_read_is_a_failure() -> None:
    with pytest.raises(BadConversation, match="bad-json"):
        read_conversation(b"[" * 100_000, FieldNames())
