"""Conversations to train on, cleaned by fixed rules out of the forms in which they are published.

A row is `{"messages": [{"role", "content"}, ...]}`, ShareGPT's `{"conversations": [{"from", "value"}, ...]}`, or
`{"instruction", "output"}` with perhaps an `"input"`, as MathInstruct has it. `"complete": false` says that the last
answer was cut off. What cannot be used is dropped, what can be repaired is, and both are counted by reason.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

Message = dict[str, str]

_ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
}


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages with alternating user and assistant roles, an optional system message first.

    `complete` is false when the last answer was cut off before its end.
    """

    messages: tuple[Message, ...]
    complete: bool = True


@dataclasses.dataclass
class Counts:
    """How many rows were read, kept as they were, repaired and dropped, the last two by reason."""

    read: int = 0
    kept: int = 0
    repaired: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    dropped: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def table(self) -> str:
        """A line per count; a repaired row is kept too, and may have been repaired in several ways."""
        lines = [("rows read", self.read), ("conversations kept", self.kept)]
        lines += [(f"repaired: {reason}", count) for reason, count in sorted(self.repaired.items())]
        lines += [(f"dropped: {reason}", count) for reason, count in sorted(self.dropped.items())]
        return "\n".join(f"  {count:>9,}  {name}" for name, count in lines)


class _Unusable(ValueError):  # noqa: N818 - says why a row is dropped
    pass


def clean(rows: Iterable[Any], counts: Counts) -> Iterator[Conversation]:
    """Yields the usable conversations of `rows`, counting what became of each.

    Rules, in order: roles are unified; empty messages at the end are left out; an opening answer is left out;
    neighbours of one role are joined by a blank line; a question at the end without its answer is left out. A row is
    dropped when it has no known form, a message that is no text, an unknown role, an empty message inside, a system
    message that is not first, or no answer.
    """
    for row in rows:
        counts.read += 1
        try:
            conversation, repairs = _cleaned(row)
        except _Unusable as reason:
            counts.dropped[str(reason)] += 1
        else:
            counts.kept += 1
            counts.repaired.update(repairs)
            yield conversation


def _cleaned(row: Any) -> tuple[Conversation, set[str]]:
    complete = row.get("complete", True) if isinstance(row, dict) else True
    if not isinstance(complete, bool):
        raise _Unusable("complete is neither true nor false")
    messages, repairs = _messages(row), set()
    while messages and not messages[-1]["content"].strip():
        messages.pop()
        repairs.add("empty message at the end left out")
    if not messages:
        raise _Unusable("no messages")
    if any(not message["content"].strip() for message in messages):
        raise _Unusable("empty message inside")
    system = messages[:1] if messages[0]["role"] == "system" else []
    turns = messages[len(system) :]
    if any(message["role"] == "system" for message in turns):
        raise _Unusable("system message that is not first")
    while turns and turns[0]["role"] == "assistant":
        turns.pop(0)
        repairs.add("opening answer without a question left out")
    joined: list[Message] = []
    for message in turns:
        if joined and joined[-1]["role"] == message["role"]:
            joined[-1] = {"role": message["role"], "content": f"{joined[-1]['content']}\n\n{message['content']}"}
            repairs.add("neighbours of one role joined")
        else:
            joined.append(message)
    if joined and joined[-1]["role"] == "user":
        joined.pop()
        repairs.add("question without an answer at the end left out")
        complete = True  # the answer that was cut off, if any, is not the last one
    if not joined:
        raise _Unusable("no answer")
    return Conversation((*system, *joined), complete), repairs


def _messages(row: Any) -> list[Message]:
    """The row's messages with unified roles; raises _Unusable."""
    if not isinstance(row, dict):
        raise _Unusable("not an object")
    if "messages" in row or "conversations" in row:
        given = row.get("messages", row.get("conversations"))
        if not isinstance(given, list):
            raise _Unusable("messages are not a list")
        return [_message(message) for message in given]
    if "instruction" in row and "output" in row:
        parts = [row["instruction"], row.get("input") or "", row["output"]]
        if not all(isinstance(part, str) for part in parts):
            raise _Unusable("a message is not text")
        question = "\n\n".join(part for part in parts[:2] if part.strip())
        return [{"role": "user", "content": question}, {"role": "assistant", "content": parts[2]}]
    raise _Unusable("neither messages, conversations nor instruction and output")


def _message(message: Any) -> Message:
    if not isinstance(message, dict):
        raise _Unusable("a message is not an object")
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    if not isinstance(content, str):
        raise _Unusable("a message is not text")
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise _Unusable("unknown role")
    return {"role": _ROLES[role.lower()], "content": content}
