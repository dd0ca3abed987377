"""Acceptance length of the averages between two drafters: the paper's interpolation curve.

    python -m taps_jax.sweep --drafter=math=DIR --drafter=chat=DIR --workloads=mini_gsm8k,mini_mt_bench

Writes averaging_sweep.csv and figures/averaging_sweep.png and .svg in the workdir; in a table's workdir its report then
shows the figure. Greedy; every text is decoded once and replayed with all averages, and kept for the next run.
"""

import csv
from pathlib import Path

from absl import flags

from taps_jax import cli, decoder_flags
from taps_jax.checkpoints.average import average_drafters
from taps_jax.checkpoints.verifier import load_verifier
from taps_jax.errors import InputError
from taps_jax.evaluation import grid
from taps_jax.evaluation.answering import Recipe
from taps_jax.evaluation.figures import save_figure
from taps_jax.evaluation.grid import Grid
from taps_jax.evaluation.plan import Plan, planned_rows
from taps_jax.evaluation.store import Cells
from taps_jax.evaluation.summary import summarise
from taps_jax.evaluation.tables import format_table
from taps_jax.evaluation.workloads import load_workload
from taps_jax.files import replacing
from taps_jax.loading import load_drafters, shipped_drafters, tree_shape

_WORKLOADS = flags.DEFINE_list("workloads", None, "mt_bench, gsm8k, math_500, svamp, or mini_ those.", required=True)
_WEIGHTS = flags.DEFINE_list("weights", [f"{n / 10:g}" for n in range(1, 10)], "Of the second drafter.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/sweep", "Folder for answers, traces and results.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of the workloads' files, instead of the hub.")
_NUM_QUESTIONS = flags.DEFINE_integer("num_questions", None, "Use only the first of each workload.", lower_bound=1)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Most tokens per answer.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Questions answered at once.", lower_bound=1)

_HEADER = ("first", "second", "weight_of_second", "workload", "questions", "tau", "tau_low", "tau_high")


def main() -> None:
    weights = _weights()
    data_dir = Path(_DATA_DIR.value) if _DATA_DIR.value else None
    workloads = {name: load_workload(name, data_dir) for name in _WORKLOADS.value}
    tree = decoder_flags.given_tree() or tree_shape()
    verifier = load_verifier(decoder_flags.VERIFIER.value)
    names = decoder_flags.DRAFTER.value
    pair = load_drafters(names, verifier) if names else shipped_drafters(verifier)
    if len(pair) != 2:
        raise InputError(f"a sweep is between two drafters, given are {len(pair)}: use --drafter twice")
    mixed = [average_drafters(pair, [1 - weight, weight], f"{weight:g}") for weight in weights]
    drafters = (pair[0], *mixed, pair[1])
    weights = [0.0, *weights, 1.0]
    labels = [drafter.name for drafter in drafters]
    plan = Plan(drafters, planned_rows([(label, "single", (label,)) for label in labels], labels))
    workdir = Path(_WORKDIR.value)
    columns = grid.make_columns(verifier, workloads, [Recipe("", _MAX_NEW_TOKENS.value, 0.0, 0)], _NUM_QUESTIONS.value)
    planned = Grid(workdir, verifier, plan, tree, columns, _BATCH_SIZE.value)
    for title, stage, count in (
        ("answering", grid.answer, grid.missing_answers(planned)),
        ("replaying", grid.replay, grid.missing_traces(planned)),
    ):
        for _ in cli.progress(stage(planned), title, count):
            pass
    rows = _rows(planned, weights, pair[0].name, pair[1].name)
    with replacing(workdir / "averaging_sweep.csv") as temporary, temporary.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([_HEADER, *rows])
    save_figure(workdir / "figures" / "averaging_sweep", lambda pyplot: _draw(pyplot, rows))
    print(format_table(("weight", *workloads), _table(rows, list(workloads))))
    print(workdir / "averaging_sweep.csv")


def _weights() -> list[float]:
    try:
        weights = sorted({float(text) for text in _WEIGHTS.value})
    except ValueError:
        weights = [-1.0]
    if not all(0 < weight < 1 for weight in weights):
        raise InputError(f"--weights is {','.join(_WEIGHTS.value)}, expected numbers between 0 and 1")
    return weights


def _rows(planned: Grid, weights: list[float], first: str, second: str) -> list[tuple]:
    questions = {column.workload: [str(q.question_id) for q in column.questions] for column in planned.columns}
    stored = [planned.cell(row, column) for row in planned.plan.rows for column in planned.columns]
    found = iter(summarise(Cells(planned.workdir, questions, stored), {})["cells"])
    rows = []
    for weight in weights:
        for column in planned.columns:
            cell = next(found)
            rows.append((first, second, weight, column.workload, cell["questions"], cell["tau"], *cell["tau_interval"]))
    return rows


def _table(rows: list[tuple], workloads: list[str]) -> list[list[str]]:
    found = {(weight, workload): tau for _, _, weight, workload, _, tau, _, _ in rows}
    return [
        [f"{weight:g}", *(f"{found[weight, workload]:.2f}" for workload in workloads)]
        for weight in dict.fromkeys(weight for weight, _ in found)
    ]


def _draw(pyplot, rows: list[tuple]):
    figure, axis = pyplot.subplots(figsize=(5.2, 3.4))
    for workload in dict.fromkeys(row[3] for row in rows):
        chosen = [row for row in rows if row[3] == workload]
        weights, taus, lows, highs = (list(part) for part in zip(*(row[2:3] + row[5:] for row in chosen), strict=True))
        (line,) = axis.plot(weights, taus, marker="o", ms=3, lw=1.4, label=workload)
        axis.fill_between(weights, lows, highs, color=line.get_color(), alpha=0.12, lw=0)
    axis.set_xlabel(f"weight of {rows[0][1]} (the rest: {rows[0][0]})")
    axis.set_ylabel("acceptance length")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    return figure


if __name__ == "__main__":
    cli.run(main)
