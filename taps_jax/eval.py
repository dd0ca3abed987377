"""Measures a drafter: acceptance length, speed against plain decoding, and whether the answers are the same.

python -m taps_jax.eval --verifier=smollm2 --drafter=runs/smollm2/drafter --questions=FILE[,FILE...]
"""

import sys
from pathlib import Path

from absl import flags

from taps_jax import cli, decoder_flags
from taps_jax.checkpoints.verifier import load_verifier
from taps_jax.data.questions import read_questions
from taps_jax.evaluation.metrics import totals
from taps_jax.evaluation.runner import Comparison, Pair
from taps_jax.evaluation.tables import format_table
from taps_jax.loading import plain_decoder, speculative_decoder
from taps_jax.speculative.engine import engine_factory

_QUESTIONS = flags.DEFINE_list("questions", None, "Question files in MT-Bench format, a table row each.", required=True)
_NUM_QUESTIONS = flags.DEFINE_integer("num_questions", None, "Use only this many of each file.", lower_bound=1)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 96, "Most tokens per answer.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 1, "Questions decoded at once.", lower_bound=1)

_HEADER = ("questions", "answers", "tokens", "acceptance length", "plain tok/s", "speculative tok/s", "speed-up")


def main() -> None:
    tree = decoder_flags.given_tree()
    files = {Path(name).stem: read_questions(Path(name))[: _NUM_QUESTIONS.value] for name in _QUESTIONS.value}
    verifier = load_verifier(decoder_flags.VERIFIER.value)
    drafting = decoder_flags.given_drafting(verifier)
    shape = decoder_flags.chosen_tree(tree, verifier, drafting, _BATCH_SIZE.value)
    composed = speculative_decoder(verifier, drafting.drafters, shape, drafting.composition)
    plain, speculative = (
        engine_factory(
            *decoder, verifier.stop_tokens, batch_size=_BATCH_SIZE.value, max_new_tokens=_MAX_NEW_TOKENS.value
        )
        for decoder in (plain_decoder(verifier), composed)
    )
    rows, pairs, seconds = [], [], [0.0, 0.0]
    for name, questions in files.items():
        comparison = Comparison(
            plain, speculative, verifier.tokenizer, verifier.stop_tokens, questions, _MAX_NEW_TOKENS.value
        )
        turns = sum(len(question.turns) for question in questions)
        found = list(cli.progress(comparison, name, turns))
        rows.append(_row(name, found, comparison.plain_seconds, comparison.speculative_seconds))
        pairs += found
        seconds[0] += comparison.plain_seconds
        seconds[1] += comparison.speculative_seconds
    if len(rows) > 1:
        rows.append(_row("all", pairs, *seconds))
    size = f"{shape.total_token} nodes, depth {shape.depth}, top_k {shape.top_k}"
    nodes = drafting.composition.num_nodes(shape, len(drafting.drafters))
    print(f"\n{drafting}, trees of {size}; {nodes} nodes verified per step")
    print(format_table(_HEADER, rows))
    different = [pair for pair in pairs if not pair.identical]
    for pair in different:
        tokens = zip(pair.plain.completion.tokens, pair.speculative.completion.tokens, strict=False)
        at = next((index for index, (one, other) in enumerate(tokens) if one != other), "the end")
        print(f"question {pair.plain.question.question_id} differs from token {at} on", file=sys.stderr)
    print(f"lossless: {len(pairs) - len(different)}/{len(pairs)} answers identical")


def _row(name: str, pairs: list[Pair], plain_seconds: float, speculative_seconds: float) -> tuple[str, ...]:
    found = totals(pair.speculative.completion for pair in pairs)
    plain_speed = totals(pair.plain.completion for pair in pairs).tokens / plain_seconds
    speed = found.tokens / speculative_seconds
    return (
        name,
        str(found.answers),
        str(found.tokens),
        f"{found.acceptance_length:.2f}",
        f"{plain_speed:.1f}",
        f"{speed:.1f}",
        f"{speed / plain_speed:.2f}x",
    )


if __name__ == "__main__":
    cli.run(main)
