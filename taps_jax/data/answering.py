"""Asking the questions of a file, turn by turn, with the answers so far as the conversation."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from taps_jax.data.conversations import Message
from taps_jax.data.questions import Question
from taps_jax.data.tokenize import encode_prompt
from taps_jax.speculative.engine import Completion, Engine, Request


class Answer(NamedTuple):
    """One answered turn.

    Attributes:
      question: the question.
      turn: which of its turns.
      messages: the conversation up to and with this answer.
      completion: how it was decoded.
      last: no further turn of the question follows.
    """

    question: Question
    turn: int
    messages: tuple[Message, ...]
    completion: Completion
    last: bool


def answer_questions(
    make_engine: Callable[[int], Engine],
    tokenizer: PreTrainedTokenizerBase,
    stop_tokens: tuple[int, ...],
    questions: list[Question],
    max_new_tokens: int,
) -> Iterator[Answer]:
    """Greedy answers: to the first turn of every question, then to the second of those that have one, and so on.

    Args:
      make_engine: given the longest prompt of a turn, an engine whose cache it fits.
      tokenizer: with a chat template.
      stop_tokens: ids that end an answer.
      questions: at least one.
      max_new_tokens: most tokens per answer. A question whose answer is cut there gets no further turns.
    Yields:
      Answers in order of completion.
    """
    waiting: list[tuple[Question, tuple[Message, ...]]] = [(question, ()) for question in questions]
    for turn in range(max(len(question.turns) for question in questions)):
        asked = [(q, (*messages, {"role": "user", "content": q.turns[turn]})) for q, messages in waiting]
        prompts = [encode_prompt(tokenizer, messages) for _, messages in asked]
        engine = make_engine(max(map(len, prompts)))
        waiting = []
        for completion in engine.decode(Request(prompt, max_new_tokens) for prompt in prompts):
            question, messages = asked[completion.index]
            text = tokenizer.decode(completion.tokens, skip_special_tokens=True).strip()
            messages = (*messages, {"role": "assistant", "content": text})
            complete = completion.tokens[-1] in stop_tokens
            last = not complete or len(question.turns) == turn + 1
            if not last:
                waiting.append((question, messages))
            yield Answer(question, turn, messages, completion, last)
        if not waiting:
            return
