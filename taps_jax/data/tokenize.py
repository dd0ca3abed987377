"""Conversations as token ids, through the verifier's own chat template."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from taps_jax.chat import render
from taps_jax.data.conversations import Message


class Encoded(NamedTuple):
    """A tokenized conversation.

    Attributes:
      tokens: [T] int32.
      answer: [T] bool, true on the tokens of assistant answers and the stop token that ends each.
    """

    tokens: np.ndarray
    answer: np.ndarray


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[int, ...]:
    """Ids of `messages` up to where the assistant's next answer begins.

    The template writes every special token, so the tokenizer adds none.

    Raises:
      InputError: the tokenizer has no chat template.
    """
    return tuple(_ids(tokenizer, messages, add_generation_prompt=True))


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    stop_tokens: tuple[int, ...],
    complete: bool = True,
) -> Encoded | None:
    """Ids of a whole conversation and which of them the assistant wrote.

    Answer boundaries come from rendering the conversation up to each answer, not from searching for markers, which an
    answer's text may contain. An answer ends with the stop token that the template writes after its text.

    Args:
      tokenizer: with a chat template.
      messages: the conversation.
      stop_tokens: ids that end an answer.
      complete: false if the last answer was cut off: the result then ends with its text, for the end of turn that the
        template adds is not the verifier's.
    Returns:
      None if what precedes an answer is not a prefix of the whole, as with templates that rewrite earlier turns.
    """
    whole = _ids(tokenizer, messages, add_generation_prompt=False)
    answer, end = np.zeros(len(whole), bool), len(whole)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _ids(tokenizer, messages[:index], add_generation_prompt=True)
        through = _ids(tokenizer, messages[: index + 1], add_generation_prompt=False)
        if whole[: len(before)] != before or whole[: len(through)] != through:
            return None
        ends = [at for at in range(len(before), len(through)) if through[at] in stop_tokens]
        end = ends[-1] if ends else len(through)
        answer[len(before) : end + len(ends[-1:])] = True
    size = len(whole) if complete else end
    return Encoded(np.asarray(whole[:size], np.int32), answer[:size])


def supervised_positions(answer: np.ndarray) -> np.ndarray:
    """Where the drafter is trained: position j reads token j+1 and predicts token j+2, both of one answer.

    Args:
      answer: [T] bool.
    Returns:
      [T] bool; the last two positions are false.
    """
    supervised = np.zeros_like(answer)
    supervised[:-2] = answer[1:-1] & answer[2:]
    return supervised


def _ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
    text = render(tokenizer, messages, add_generation_prompt)
    return tokenizer(text, add_special_tokens=False)["input_ids"]
