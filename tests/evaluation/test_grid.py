"""A grid's answers, traces and checks: right, complete after an interruption, and never mixed."""

import dataclasses
import itertools
from pathlib import Path

import jax
import numpy as np
import pytest

from taps_jax.checkpoints.hf_drafter import drafter_config, write_drafter
from taps_jax.checkpoints.verifier import load_verifier
from taps_jax.data.questions import Question
from taps_jax.errors import InputError
from taps_jax.evaluation import checking, grid
from taps_jax.evaluation.answering import Recipe
from taps_jax.evaluation.grid import Grid, make_columns
from taps_jax.evaluation.plan import base_config, planned_rows, read_plan
from taps_jax.evaluation.speed import Speeds
from taps_jax.evaluation.store import Answers, load_cells, write_grid
from taps_jax.models.drafter import init_drafter
from taps_jax.speculative.tree import TreeShape
from tests.tiny_hf import WORDS, write_tiny_verifier

ROWS = (
    ("One", "single", ("one",)),
    ("Mean", "single", ("mean",)),
    ("Routed", "route:confidence", ("one", "other")),
    ("Joined", "merge:trie", ("one", "other")),
)
RECIPES = [Recipe("", 10, temperature, 3) for temperature in (0.0, 1.0)]
# 17 answers are two parts of a trace
WORKLOADS = {
    "chat": [Question(index, "", (" ".join(WORDS[index : index + 4]), WORDS[index])) for index in range(3)],
    "short": [Question(f"q{index}", "", (WORDS[index],), ("7",)) for index in range(17)],
}


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return load_verifier(str(write_tiny_verifier(tmp_path_factory.mktemp("verifier"))))


@pytest.fixture(scope="module")
def config(verifier, tmp_path_factory):
    """Two random drafters whose sharpened weights disagree, and their mean."""
    folder, config = tmp_path_factory.mktemp("drafters"), base_config()
    for seed, name in enumerate(("one", "other")):
        shape = drafter_config(verifier.config)
        params = jax.tree.map(lambda leaf: leaf * 3, init_drafter(shape, jax.random.key(seed)))
        write_drafter(folder / name, shape, params, None, verifier.fingerprint)
        config.drafters[name] = str(folder / name)
    config.averages.mean = {"one": 0.25, "other": 0.75}
    config.rows = ROWS
    return config


@pytest.fixture(scope="module")
def plan(config, verifier):
    return read_plan(config, verifier)


@pytest.fixture
def make_grid(verifier, plan, tmp_path):
    def make(workdir: Path = tmp_path / "run", num_questions: int | None = None, plan=plan) -> Grid:
        columns = make_columns(verifier, WORKLOADS, RECIPES, num_questions)
        return Grid(workdir, verifier, plan, TreeShape(8, 2, 3), columns, batch_size=4)

    return make


def compute(made: Grid) -> tuple[int, int, int]:
    """Runs the stages to their ends; how many units each had."""
    expected = grid.missing_answers(made), grid.missing_traces(made), checking.missing_checks(made)
    found = tuple(sum(1 for _ in stage(made)) for stage in (grid.answer, grid.replay, checking.check))
    assert found == expected
    cells = [made.cell(row, column) for row in made.plan.rows for column in made.columns]
    write_grid(made.workdir, {}, {c.workload: [str(q.question_id) for q in c.questions] for c in made.columns}, cells)
    return found


def contents(workdir: Path) -> dict[str, bytes]:
    return {str(path.relative_to(workdir)): path.read_bytes() for path in workdir.rglob("*") if path.is_file()}


def test_cells_are_whole_and_decoding_takes_their_steps(make_grid, plan):
    made = make_grid()
    assert compute(made) == (46, 46, 4 * checking.ANSWERS_CHECKED)
    for found in checking.checks(made).values():
        assert all(check["same_text"] and check["same_steps"] for check in found)
        assert {(check["workload"], check["temperature"]) for check in found} == {
            (name, recipe.temperature) for name in WORKLOADS for recipe in RECIPES
        }
    _, cells = load_cells(made.workdir)
    assert [(cell.row, cell.workload, cell.temperature) for cell in cells] == list(
        itertools.product([row[0] for row in ROWS], WORKLOADS, [recipe.temperature for recipe in RECIPES])
    )
    for cell in cells:
        assert cell.nodes == 8
        assert len(cell.answers) == sum(len(question.turns) for question in WORKLOADS[cell.workload])
        for answer in cell.answers:
            assert len(cell.pieces[answer.question_id, answer.turn]) == len(answer.tokens)
            if answer.steps is not None:
                assert answer.steps.committed.sum() == len(answer.tokens) - 1
    assert cells[0].questions["1", 1] == WORKLOADS["chat"][1].turns[1]
    assert set(cells[2].correct) == {f"q{index}" for index in range(17)} and not cells[0].correct
    sampled, greedy = cells[1], cells[0]
    assert [answer.tokens for answer in sampled.answers] != [answer.tokens for answer in greedy.answers]


def test_an_average_is_the_weighted_mean(plan):
    one, other, mean = (drafter.params["fc"]["weight"] for drafter in plan.drafters)
    np.testing.assert_allclose(mean, 0.25 * one + 0.75 * other, rtol=1e-6)


def test_an_interrupted_run_ends_with_the_same_files(make_grid, tmp_path):
    """Stopped in the middle of answers, with a half-written line, and in the middle of traces."""
    whole, stopped = make_grid(tmp_path / "whole"), make_grid(tmp_path / "stopped")
    compute(whole)
    list(itertools.islice(grid.answer(stopped), 20))
    file = next((stopped.workdir / "answers").glob("short-0-*"))
    file.write_bytes(file.read_bytes() + b'{"question_id": "q1')
    assert sum(1 for _ in grid.answer(stopped)) == 46 - 20
    list(itertools.islice(grid.replay(stopped), 10))
    compute(stopped)
    found, expected = contents(stopped.workdir), contents(whole.workdir)
    assert found.keys() == expected.keys()
    for name in expected:  # answers are in order of completion, which the interruption changes
        assert sorted(found[name].splitlines()) == sorted(expected[name].splitlines()), name
        assert name.startswith("answers/") or found[name] == expected[name], name
    assert compute(stopped) == (0, 0, 0)


def test_more_questions_use_the_answers_of_fewer(make_grid):
    few = make_grid(num_questions=2)
    assert compute(few)[0] == 2 * (4 + 2)
    assert len(load_cells(few.workdir)[1][0].answers) == 4
    assert compute(make_grid())[0] == 46 - 12


def test_other_weights_get_their_own_traces(make_grid, plan):
    compute(make_grid(num_questions=1))
    changed = dataclasses.replace(
        plan.drafters[1], params=jax.tree.map(lambda leaf: leaf * 0.9, plan.drafters[1].params)
    )
    other = dataclasses.replace(plan, drafters=(plan.drafters[0], changed, plan.drafters[2]))
    answers, traces, checks = compute(make_grid(num_questions=1, plan=other))
    assert not answers
    assert traces == 2 * (2 + 1) and checks == 2 * 4  # only of the two rows that use it


def test_measuring_decodes_the_same_text(make_grid):
    made = make_grid(num_questions=2)
    compute(made)
    assert sum(1 for _ in checking.measure(made)) == checking.answers_to_measure(made)
    speeds = Speeds(made.workdir).found
    assert len(speeds) == 16
    for speed in speeds.values():
        assert speed.identical == speed.answers
        assert speed.tokens == speed.plain_tokens > 0 and speed.seconds > 0
    assert load_cells(made.workdir)[1][0].speed == speeds["One", "chat", 0.0].pair


def test_a_missing_trace_is_told(make_grid):
    made = make_grid(num_questions=1)
    compute(made)
    cells = load_cells(made.workdir)[1]
    next((made.workdir / made.cell(made.plan.rows[0], made.columns[0]).traces).glob("*")).unlink()
    with pytest.raises(InputError, match="2 of 2 answers have no trace"):
        cells[0]
    with pytest.raises(InputError, match="grid.json"):
        load_cells(made.workdir / "nowhere")


def test_answers_survive_a_cut_line(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text('{"question_id": "1", "tur')
    assert not Answers(path).found and path.read_text() == ""


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), "rows is empty"),
        ((("A", "single"),), "expected .label"),
        ((("A", "best", ("one",)),), "expected .label"),
        ((("A", "single", ("none",)),), "row 'A' names none; there are one, other"),
        ((("A", "single", ("one", "other")),), "single of 2 drafters"),
        ((("A", "merge:trie", "one"),), "merge:trie of 1 drafters"),
        ((("A", "single", ("one",)), ("A", "single", ("other",))), "two rows 'A'"),
    ],
)
def test_bad_rows_are_told(rows, message):
    with pytest.raises(InputError, match=message):
        planned_rows(rows, ["one", "other"])


def test_bad_averages_are_told(config, verifier):
    bad = config.copy_and_resolve_references()
    for weights, message in (
        ({"one": 0.5, "none": 0.5}, "mean names none"),
        ({"one": 0.5, "other": 0.4}, "mean: .*0.9"),
    ):
        bad.averages.mean = weights
        with pytest.raises(InputError, match=message):
            read_plan(bad, verifier)
