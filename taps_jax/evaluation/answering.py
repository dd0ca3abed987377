"""Answers of the verifier alone, which every row of a grid is replayed along."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from taps_jax.checkpoints.verifier import Verifier
from taps_jax.data.conversations import Message
from taps_jax.data.questions import Question
from taps_jax.data.tokenize import encode_prompt
from taps_jax.evaluation.answers import is_correct
from taps_jax.evaluation.store import Answers, StoredAnswer
from taps_jax.loading import plain_decoder
from taps_jax.speculative.engine import Engine, Request, engine_factory


class Recipe(NamedTuple):
    """How questions are put and answered.

    Attributes:
      system_prompt: empty for none.
      max_new_tokens: most tokens per answer.
      temperature: 0 is greedy.
      seed: of the sampling noise.
    """

    system_prompt: str
    max_new_tokens: int
    temperature: float
    seed: int

    def request(self, prompt: tuple[int, ...], question_id: str, turn: int) -> Request:
        """What every decoder is asked, so that all write the same text."""
        seed = (self.seed, zlib.crc32(question_id.encode()), turn)
        return Request(prompt, self.max_new_tokens, self.temperature, seed=seed)


def plain_engine(verifier: Verifier, batch_size: int, max_new_tokens: int) -> Callable[[int], Engine]:
    """From the longest prompt's length to an engine without drafters."""
    return engine_factory(
        *plain_decoder(verifier), verifier.stop_tokens, batch_size=batch_size, max_new_tokens=max_new_tokens
    )


def write_answers(
    make_engine: Callable[[int], Engine],
    verifier: Verifier,
    questions: Sequence[Question],
    recipe: Recipe,
    answers: Answers,
) -> Iterator[StoredAnswer]:
    """Answers what is not answered yet: first turns, then second ones with the first answers in the conversation.

    An answer that was cut at `max_new_tokens` is followed by the next turn all the same, as in TAPS's own evaluation.

    Args:
      make_engine: as from `plain_engine`.
      verifier: whose tokenizer renders prompts.
      questions: in order.
      recipe: how they are put.
      answers: where the answers are and go.
    Yields:
      New answers, already stored.
    """
    for turn in range(max(len(question.turns) for question in questions)):
        asked = [question for question in questions if len(question.turns) > turn]
        prompts = [
            encode_prompt(verifier.tokenizer, _conversation(question, turn, recipe, answers, verifier))
            for question in asked
        ]
        waiting = [
            (question, prompt)
            for question, prompt in zip(asked, prompts, strict=True)
            if (str(question.question_id), turn) not in answers.found
        ]
        if not waiting:
            continue
        # Sized by all prompts of the turn, so that a run that goes on computes with the same shapes.
        engine = make_engine(max(map(len, prompts)))
        requests = (recipe.request(prompt, str(question.question_id), turn) for question, prompt in waiting)
        for completion in engine.decode(requests):
            question, prompt = waiting[completion.index]
            pieces = token_pieces(verifier, completion.tokens)
            last = turn == len(question.turns) - 1
            answer = StoredAnswer(
                question_id=str(question.question_id),
                turn=turn,
                question=question.turns[turn],
                prompt=prompt,
                tokens=completion.tokens,
                pieces=pieces,
                correct=is_correct(question, answer_text(verifier, completion.tokens)) if last else None,
            )
            answers.add(answer)
            yield answer


def answer_text(verifier: Verifier, tokens: Sequence[int]) -> str:
    """An answer as it is shown and as it enters the conversation."""
    return verifier.tokenizer.decode(tokens, skip_special_tokens=True).strip()


def token_pieces(verifier: Verifier, tokens: Sequence[int]) -> tuple[str, ...]:
    """The text that each token adds; of a character in several tokens, the last of them adds it."""
    pieces, shown = [], 0
    for end in range(1, len(tokens) + 1):
        text = verifier.tokenizer.decode(tokens[:end])
        if end < len(tokens) and text.endswith("\N{REPLACEMENT CHARACTER}"):
            pieces.append("")
            continue
        pieces.append(text[shown:])
        shown = max(shown, len(text))
    return tuple(pieces)


def _conversation(
    question: Question, turn: int, recipe: Recipe, answers: Answers, verifier: Verifier
) -> tuple[Message, ...]:
    messages: list[Message] = []
    if recipe.system_prompt:
        messages.append({"role": "system", "content": recipe.system_prompt})
    for earlier in range(turn):
        tokens = answers.found[str(question.question_id), earlier].tokens
        messages.append({"role": "user", "content": question.turns[earlier]})
        messages.append({"role": "assistant", "content": answer_text(verifier, tokens)})
    return (*messages, {"role": "user", "content": question.turns[turn]})
