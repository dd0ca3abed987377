"""Running a grid from its config to its report; what is in the working folder already is not computed again."""

import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from taps_jax import cli
from taps_jax.benchmarks.tree_choice import cached_tree
from taps_jax.checkpoints.verifier import Verifier, load_verifier
from taps_jax.evaluation import checking, grid
from taps_jax.evaluation.answering import Recipe
from taps_jax.evaluation.grid import Grid
from taps_jax.evaluation.plan import Plan, read_plan, weights_hash
from taps_jax.evaluation.report import write_report
from taps_jax.evaluation.store import load_cells, write_grid, write_vocabulary
from taps_jax.evaluation.summary import summarise
from taps_jax.evaluation.workloads import load_workload
from taps_jax.loading import parsed_tree
from taps_jax.speculative.tree import TreeShape


def run_grid(
    config: ConfigDict,
    workloads: Sequence[str],
    temperatures: Sequence[float],
    workdir: Path,
    *,
    drafters: Sequence[str] = (),
    data_dir: Path | None = None,
    num_questions: int | None = None,
    decode: bool = False,
    compare_published: bool = False,
) -> dict[str, Any]:
    """Computes what is missing of a table and writes its report.

    Args:
      config: as `plan.base_config`.
      workloads: names for `load_workload`.
      temperatures: 0 is greedy.
      workdir: where everything goes.
      drafters: NAME=DIRECTORY, to use instead of the config's.
      data_dir: folder of the workloads' files; None takes embedded ones, or the hub's.
      num_questions: use only the first of each workload.
      decode: also decode everything with every row, to measure speed.
      compare_published: put the paper's numbers beside these.
    Returns:
      The results, as in results.json.
    Raises:
      InputError: something named is not there or does not fit.
    """
    questions = {name: load_workload(name, data_dir) for name in workloads}
    given_tree = parsed_tree(config.tree, "config.tree")
    verifier = load_verifier(config.verifier)
    plan = read_plan(config, verifier, drafters)
    recipes = [Recipe(config.system_prompt, config.max_new_tokens, float(value), config.seed) for value in temperatures]
    planned = Grid(
        workdir,
        verifier,
        plan,
        given_tree or _fastest_tree(verifier, plan, config.batch_size),
        grid.make_columns(verifier, questions, recipes, num_questions),
        config.batch_size,
    )
    _compute(planned, decode)
    used = {column.workload: [str(q.question_id) for q in column.questions] for column in planned.columns}
    cells = [planned.cell(row, column) for row in plan.rows for column in planned.columns]
    write_vocabulary(workdir, [verifier.tokenizer.decode([token]) for token in range(verifier.config.vocab_size)])
    write_grid(workdir, _settings(planned, config), used, cells)
    settings, cells = load_cells(workdir)
    results = summarise(cells, settings)
    write_report(workdir, results, cells, compare_published)
    return results


def _fastest_tree(verifier: Verifier, plan: Plan, batch_size: int) -> TreeShape:
    found = cached_tree(verifier, plan.drafters[0], batch_size, cli.progress)
    print(found, file=sys.stderr)
    return found.best.shape


def _compute(planned: Grid, decode: bool) -> None:
    stages = [
        ("answering", grid.answer, grid.missing_answers(planned)),
        ("replaying", grid.replay, grid.missing_traces(planned)),
        ("checking", checking.check, checking.missing_checks(planned)),
    ]
    if decode:
        stages.append(("decoding", checking.measure, checking.answers_to_measure(planned)))
    with cli.progress(None, "answering", sum(count for _, _, count in stages)) as bar:
        for title, stage, _ in stages:
            bar.set_description(title)
            for _ in stage(planned):
                bar.update()


def _settings(planned: Grid, config: ConfigDict) -> dict[str, Any]:
    return {
        "taps_jax": version("taps_jax"),
        "verifier": config.verifier,
        "verifier_fingerprint": planned.verifier.fingerprint,
        "tree": str(planned.shape),
        "system_prompt": config.system_prompt,
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
        "drafters": {drafter.name: weights_hash(drafter) for drafter in planned.plan.drafters},
        "averages": config.averages.to_dict(),
        "checks": checking.checks(planned),
    }
