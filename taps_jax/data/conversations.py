"""Conversations to train on: rows of {"messages": [{"role", "content"}, ...], "complete": true}.

`complete` may be left out; false says that the last answer was cut off.
"""

import dataclasses
from pathlib import Path
from typing import Any

from taps_jax.data.jsonl import read_rows
from taps_jax.errors import InputError

Message = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages with alternating user and assistant roles, an optional system message first.

    `complete` is false when the last answer was cut off before its end.
    """

    messages: tuple[Message, ...]
    complete: bool = True


def read_conversations(path: Path) -> list[Conversation]:
    """Reads a JSON lines file of conversations.

    Raises:
      InputError: a row is malformed, or there are none; the message names the line.
    """
    conversations = [Conversation(_messages(place, row), _complete(place, row)) for place, row in read_rows(path)]
    if not conversations:
        raise InputError(f"{path}: no conversations found")
    return conversations


def _complete(place: str, row: dict[str, Any]) -> bool:
    complete = row.get("complete", True)
    if not isinstance(complete, bool):
        raise InputError(f"{place}: complete is {complete!r}, expected true or false")
    return complete


def _messages(place: str, row: dict[str, Any]) -> tuple[Message, ...]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{place}: messages is {messages!r}, expected a list of role/content objects")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise InputError(f"{place}: a message is {message!r}, expected an object with strings role and content")
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if not turns or any(role != ("user", "assistant")[index % 2] for index, role in enumerate(turns)):
        raise InputError(f"{place}: roles are {roles}, expected user and assistant in turn after an optional system")
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)
