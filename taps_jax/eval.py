"""Measures drafters: one against plain decoding, or a whole table of them with its report.

    python -m taps_jax.eval --verifier=smollm2 --drafter=runs/smollm2/drafter --questions=FILE[,FILE...]
    python -m taps_jax.eval --config=configs/table.py --workloads=mt_bench,gsm8k,math_500,svamp --temperatures=0,1

The first decodes each question both ways: acceptance length, speed, and whether the answers are the same. The second
fills a table whose rows the config declares; the same command goes on where an interrupted run stopped.
"""

import sys
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from taps_jax import cli, decoder_flags
from taps_jax.checkpoints.verifier import load_verifier
from taps_jax.data.questions import read_questions
from taps_jax.errors import InputError
from taps_jax.evaluation.metrics import totals
from taps_jax.evaluation.run import run_grid
from taps_jax.evaluation.runner import Comparison, Pair
from taps_jax.evaluation.tables import format_table
from taps_jax.loading import plain_decoder, speculative_decoder
from taps_jax.speculative.engine import engine_factory

_QUESTIONS = flags.DEFINE_list("questions", None, "Question files in MT-Bench format, a table row each.")
_CONFIG = config_flags.DEFINE_config_file("config", None, "A table's configuration; --config.x=y overrides a field.")
_WORKLOADS = flags.DEFINE_list("workloads", None, "Of the table: mt_bench, gsm8k, math_500, svamp, or mini_ those.")
_TEMPERATURES = flags.DEFINE_list("temperatures", ["0"], "Of the table; 0 is greedy.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the table; by default one in runs/, named by the config.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of the workloads' files, instead of the hub.")
_DECODE = flags.DEFINE_bool("decode", False, "Also decode the whole table for real, to measure speed.")
_COMPARE_PUBLISHED = flags.DEFINE_bool("compare_published", False, "Put the paper's numbers beside the table's.")
_NUM_QUESTIONS = flags.DEFINE_integer("num_questions", None, "Use only this many of each file.", lower_bound=1)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 96, "Most tokens per answer.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 1, "Questions decoded at once.", lower_bound=1)

_HEADER = ("questions", "answers", "tokens", "acceptance length", "plain tok/s", "speculative tok/s", "speed-up")


def main() -> None:
    if (_QUESTIONS.value is None) == (_CONFIG.value is None):
        raise InputError("give either --questions, to measure one decoder, or --config, to fill a table")
    if _QUESTIONS.value is None:
        _fill_table()
    else:
        _compare()


def _fill_table() -> None:
    if not _WORKLOADS.value:
        raise InputError("--workloads is missing, such as --workloads=mini_mt_bench,mini_gsm8k")
    workdir = Path(_WORKDIR.value or Path("runs", _table_name()))
    run_grid(
        cli.loaded_config(_CONFIG),
        _WORKLOADS.value,
        [_temperature(text) for text in _TEMPERATURES.value],
        workdir,
        drafters=decoder_flags.DRAFTER.value or (),
        data_dir=_DATA_DIR.value and Path(_DATA_DIR.value),
        num_questions=_NUM_QUESTIONS.value,
        decode=_DECODE.value,
        compare_published=_COMPARE_PUBLISHED.value,
    )
    print((workdir / "table.md").read_text())
    print(workdir)


def _table_name() -> str:
    """The config's name and argument: table-smollm2 for configs/table.py:smollm2."""
    path, _, argument = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
    return "-".join(filter(None, (Path(path).stem, argument)))


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise InputError(f"--temperatures holds {text!r}, expected numbers from 0 up")
    return value


def _compare() -> None:
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
