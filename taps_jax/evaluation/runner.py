"""Decoding the same questions plainly and speculatively, and pairing the answers."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from taps_jax.data.answering import Answer, answer_questions
from taps_jax.data.questions import Question
from taps_jax.data.tokenize import encode_prompt
from taps_jax.speculative.engine import Engine

MakeEngine = Callable[[int], Engine]


class Pair(NamedTuple):
    """One turn as both decoders answered it."""

    plain: Answer
    speculative: Answer

    @property
    def identical(self) -> bool:
        return self.plain.completion.tokens == self.speculative.completion.tokens


class Comparison:
    """Both decoders on some questions. They take turns, so that a machine that gets busy slows both.

    Iterate to decode; afterwards the seconds are what each decoder worked, without compilation.
    """

    def __init__(
        self,
        make_plain: MakeEngine,
        make_speculative: MakeEngine,
        tokenizer: PreTrainedTokenizerBase,
        stop_tokens: tuple[int, ...],
        questions: list[Question],
        max_new_tokens: int,
    ):
        """Arguments as for `answer_questions`, which both decoders run."""
        self._lengths = [len(encode_prompt(tokenizer, [{"role": "user", "content": q.turns[0]}])) for q in questions]
        self._engines: tuple[list[Engine], list[Engine]] = ([], [])
        self._answers = tuple(
            answer_questions(self._warm(make, engines), tokenizer, stop_tokens, questions, max_new_tokens)
            for make, engines in zip((make_plain, make_speculative), self._engines, strict=True)
        )

    @property
    def plain_seconds(self) -> float:
        return sum(engine.seconds for engine in self._engines[0])

    @property
    def speculative_seconds(self) -> float:
        return sum(engine.seconds for engine in self._engines[1])

    def __iter__(self) -> Iterator[Pair]:
        waiting: tuple[dict, dict] = ({}, {})
        while True:
            found = [next(answers, None) for answers in self._answers]
            if not any(found):
                return
            for side, answer in zip(waiting, found, strict=True):
                if answer:
                    side[answer.question.question_id, answer.turn] = answer
            for key in waiting[0].keys() & waiting[1].keys():
                yield Pair(*(side.pop(key) for side in waiting))

    def _warm(self, make_engine: MakeEngine, engines: list[Engine]) -> MakeEngine:
        def make(longest: int) -> Engine:
            engine = make_engine(longest)
            engine.warm_up([*(length for length in self._lengths if length <= longest), longest])
            engines.append(engine)
            return engine

        return make
