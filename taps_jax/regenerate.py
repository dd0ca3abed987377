"""Writes training conversations: the verifier's own answers to questions.

python -m taps_jax.regenerate --questions=FILE[,FILE...] --output=answers.jsonl
python -m taps_jax.regenerate --questions=FILE --compare=answers.jsonl --num_questions=16
"""

import json
from pathlib import Path

from absl import flags

from taps_jax import cli
from taps_jax.checkpoints.verifier import load_verifier
from taps_jax.data.answering import answer_questions
from taps_jax.data.jsonl import read_rows, write_rows
from taps_jax.data.questions import read_questions
from taps_jax.data.regenerate import conversation_rows
from taps_jax.errors import InputError
from taps_jax.speculative.decode import Models, Weights
from taps_jax.speculative.engine import engine_factory

_VERIFIER = flags.DEFINE_string("verifier", "smollm2", "smollm2, a GGUF file, a directory or a hub id.")
_QUESTIONS = flags.DEFINE_list("questions", None, "Question files in MT-Bench format.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Conversations file to write.")
_COMPARE = flags.DEFINE_string("compare", None, "Conversations file to compare with instead of writing one.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 192, "Most tokens per answer.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Questions decoded at once.", lower_bound=1)
_NUM_QUESTIONS = flags.DEFINE_integer("num_questions", None, "Use only this many, spread over the list.", lower_bound=1)


def main() -> None:
    if (_OUTPUT.value is None) == (_COMPARE.value is None):
        raise InputError("give exactly one of --output and --compare")
    expected = {}
    if _COMPARE.value:
        expected = {row.get("id"): row for _, row in read_rows(Path(_COMPARE.value))}
    questions = [question for name in _QUESTIONS.value for question in read_questions(Path(name))]
    if _NUM_QUESTIONS.value and _NUM_QUESTIONS.value < len(questions):
        questions = [questions[i * len(questions) // _NUM_QUESTIONS.value] for i in range(_NUM_QUESTIONS.value)]
    verifier = load_verifier(_VERIFIER.value)
    make_engine = engine_factory(
        Models(verifier.module),
        Weights(verifier.params),
        verifier.stop_tokens,
        batch_size=_BATCH_SIZE.value,
        max_new_tokens=_MAX_NEW_TOKENS.value,
    )
    answers = answer_questions(make_engine, verifier.tokenizer, verifier.stop_tokens, questions, _MAX_NEW_TOKENS.value)
    rows = conversation_rows(answers, verifier.stop_tokens)
    rows = list(cli.progress(rows, "writing answers", len(questions)))
    if _COMPARE.value:
        same = sum(json.dumps(row) == json.dumps(expected.get(row["id"])) for row in rows)
        print(f"answers: {same}/{len(rows)} identical to {_COMPARE.value}")
        return
    order = {question.question_id: index for index, question in enumerate(questions)}
    write_rows(Path(_OUTPUT.value), sorted(rows, key=lambda row: order[row["id"]]))
    complete = sum(row["complete"] for row in rows)
    print(f"wrote {len(rows)} conversations ({complete} with complete answers) to {_OUTPUT.value}")


if __name__ == "__main__":
    cli.run(main)
