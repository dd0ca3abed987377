"""Training conversations whose answers the verifier writes itself."""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from taps_jax.data.questions import Question
from taps_jax.data.tokenize import encode_prompt
from taps_jax.speculative.decode import Models, Weights
from taps_jax.speculative.engine import Engine, Request, cache_size_for


def write_answers(
    models: Models,
    weights: Weights,
    tokenizer: PreTrainedTokenizerBase,
    stop_tokens: tuple[int, ...],
    questions: list[Question],
    *,
    max_new_tokens: int,
    batch_size: int,
) -> Iterator[dict[str, Any]]:
    """Greedy answers to every turn of every question, as conversation rows.

    Yields:
      {"id", "category", "messages", "complete"} in order of completion. `complete` is false when the last answer was
      cut at `max_new_tokens`, so that training does not take the cut for the verifier's end of turn. A question whose
      answer is cut gets no further turns.
    """
    waiting = [(question, []) for question in questions]
    for turn in range(max(len(question.turns) for question in questions)):
        prompts = []
        for question, messages in waiting:
            messages.append({"role": "user", "content": question.turns[turn]})
            prompts.append(encode_prompt(tokenizer, messages))
        longest = max(map(len, prompts))
        engine = Engine(
            models,
            weights,
            stop_tokens,
            batch_size=batch_size,
            cache_size=cache_size_for(longest, max_new_tokens, models.path_length),
            max_new_tokens=max_new_tokens,
        )
        continued = []
        for completion in engine.decode(Request(prompt, max_new_tokens) for prompt in prompts):
            question, messages = waiting[completion.index]
            text = tokenizer.decode(completion.tokens, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text.strip()})
            complete = completion.tokens[-1] in stop_tokens
            if complete and len(question.turns) > turn + 1:
                continued.append((question, messages))
                continue
            yield {
                "id": question.question_id,
                "category": question.category,
                "messages": messages,
                "complete": complete,
            }
        waiting = continued
        if not waiting:
            return
