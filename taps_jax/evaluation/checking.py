"""Real decoding beside replay: whether a row takes the same steps, and how fast it is."""

import itertools
import json
from collections.abc import Iterator

from taps_jax.evaluation.answering import plain_engine
from taps_jax.evaluation.grid import Column, Grid
from taps_jax.evaluation.plan import PlannedRow
from taps_jax.evaluation.speed import Speed, Speeds
from taps_jax.evaluation.store import StoredAnswer, Traces, fingerprint
from taps_jax.evaluation.trace import steps_from_records
from taps_jax.files import replacing
from taps_jax.loading import speculative_decoder
from taps_jax.speculative.engine import Completion, Engine, engine_factory

ANSWERS_CHECKED = 8


def check(grid: Grid) -> Iterator[None]:
    """Decodes some answers of every row for real and stores how they compare; yields after each answer."""
    for row in grid.plan.rows:
        path = _check_path(grid, row)
        if path.exists():
            continue
        chosen = _chosen(grid)
        engine = _row_engine(grid, row, 1, [stored for _, stored in chosen])
        traces = {column: Traces(grid.workdir / grid.cell(row, column).traces).read() for column, _ in chosen}
        found = []
        for column, stored in chosen:
            records: list = []
            request = column.recipe.request(stored.prompt, *stored.key)
            (done,) = engine.decode([request], on_step=lambda _, record, into=records: into.append(record))
            steps = traces[column].get(stored.key)
            decoded = steps_from_records(records) if records else None
            found.append(
                {
                    "workload": column.workload,
                    "temperature": column.recipe.temperature,
                    "question_id": stored.question_id,
                    "turn": stored.turn,
                    "same_text": done.tokens == stored.tokens,
                    "same_steps": _starts(decoded) == _starts(steps),
                }
            )
            yield
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(found, indent=1) + "\n")


def missing_checks(grid: Grid) -> int:
    """How many answers there are still to decode for checks."""
    rows = [row for row in grid.plan.rows if not _check_path(grid, row).exists()]
    return len(rows) * min(ANSWERS_CHECKED, sum(len(column.questions) for column in grid.columns))


def checks(grid: Grid) -> dict[str, list[dict]]:
    """What the checks of every row found."""
    return {row.label: json.loads(_check_path(grid, row).read_text()) for row in grid.plan.rows}


def _starts(steps) -> list[tuple[int, int]]:
    """Where each step began and how many tokens it committed."""
    return [] if steps is None else list(zip(steps.position.tolist(), steps.committed.tolist(), strict=True))


def _check_path(grid: Grid, row: PlannedRow):
    cells = [grid.cell(row, column).traces for column in grid.columns]
    return grid.workdir / "checks" / f"{fingerprint(cells)}.json"


def _chosen(grid: Grid) -> list[tuple[Column, StoredAnswer]]:
    """First turns, taken from the columns in turn."""
    firsts = [[(column, stored) for stored in grid.stored(column) if not stored.turn] for column in grid.columns]
    mixed = (item for items in itertools.zip_longest(*firsts) for item in items if item)
    return list(itertools.islice(mixed, ANSWERS_CHECKED))


def measure(grid: Grid) -> Iterator[None]:
    """Decodes everything with every row and plainly, in turns, so that a machine that gets busy slows all alike.

    Stores the speeds of each column when it is done; yields after each answer.
    """
    speeds = Speeds(grid.workdir)
    for column in grid.columns:
        stored = grid.stored(column)
        longest = max(len(answer.prompt) for answer in stored)
        plain = plain_engine(grid.verifier, grid.batch_size, column.recipe.max_new_tokens)(longest)
        engines = {row.label: _row_engine(grid, row, grid.batch_size, stored) for row in grid.plan.rows}
        for engine in (plain, *engines.values()):
            engine.warm_up(len(answer.prompt) for answer in stored)
        plain_tokens, tokens, identical = 0, dict.fromkeys(engines, 0), dict.fromkeys(engines, 0)
        at_once = 4 * grid.batch_size
        for start in range(0, len(stored), at_once):
            part = stored[start : start + at_once]
            reference = _decode(plain, column, part)
            plain_tokens += sum(len(done.tokens) for done in reference)
            yield from (None for _ in part)
            for label, engine in engines.items():
                found = _decode(engine, column, part)
                tokens[label] += sum(len(done.tokens) for done in found)
                identical[label] += sum(
                    done.tokens == other.tokens for done, other in zip(found, reference, strict=True)
                )
                yield from (None for _ in part)
        speeds.add(
            [
                Speed(
                    label,
                    column.workload,
                    column.recipe.temperature,
                    len(stored),
                    identical[label],
                    tokens[label],
                    engine.seconds,
                    plain_tokens,
                    plain.seconds,
                )
                for label, engine in engines.items()
            ]
        )


def answers_to_measure(grid: Grid) -> int:
    """How many answers `measure` decodes."""
    return (len(grid.plan.rows) + 1) * sum(column.turns for column in grid.columns)


def _decode(engine: Engine, column: Column, answers: list[StoredAnswer]) -> list[Completion]:
    requests = [column.recipe.request(stored.prompt, *stored.key) for stored in answers]
    return sorted(engine.decode(requests), key=lambda done: done.index)


def _row_engine(grid: Grid, row: PlannedRow, batch_size: int, answers: list[StoredAnswer]) -> Engine:
    decoder = speculative_decoder(grid.verifier, grid.plan.members(row), grid.shape, row.row.composition)
    most = max(column.recipe.max_new_tokens for column in grid.columns)
    make = engine_factory(*decoder, grid.verifier.stop_tokens, batch_size=batch_size, max_new_tokens=most)
    return make(max(len(stored.prompt) for stored in answers))
