"""Benchmarks from files of every kind, with errors that name the row."""

import csv
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from taps_jax.errors import InputError
from taps_jax.evaluation.workloads import EMBEDDED, load_workload

GSM8K = [{"question": "How much is 2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}, {"question": "B?", "answer": "6"}]
SVAMP = [{"ID": "c-1", "Body": "Ann has 3 pens", "Question": "How many pens?", "Answer": "3.0", "Type": "Addition"}]


def write(path: Path, rows: list[dict]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_workloads_are_complete(name):
    questions = load_workload(name)
    assert len(questions) >= 24
    assert {len(question.turns) for question in questions} == {2 if "mt_bench" in name else 1}
    if "mt_bench" in name:
        categories = [question.category for question in questions]
        assert len(set(categories)) == 8 and all(categories.count(category) == 3 for category in categories)
    else:
        assert all(len(question.reference) == 1 for question in questions)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_original_fields_in_every_kind_of_file(tmp_path, suffix):
    write(tmp_path / f"gsm8k.{suffix}", GSM8K)
    write(tmp_path / f"svamp.{suffix}", SVAMP)
    first, second = load_workload("gsm8k", tmp_path)
    assert (first.question_id, first.turns, first.reference) == (0, (GSM8K[0]["question"],), (GSM8K[0]["answer"],))
    assert second.question_id == 1
    (question,) = load_workload("svamp", tmp_path)
    assert question.turns == ("Ann has 3 pens. How many pens?",) and question.category == "Addition"


def test_a_file_in_mt_bench_format_may_have_any_name(tmp_path):
    write(tmp_path / "mine.jsonl", [{"question_id": 4, "turns": ["a", "b"]}])
    assert load_workload("mine", tmp_path)[0].turns == ("a", "b")


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("gsm8k", [{"problem": "x"}], "line 1: no field 'question', found problem"),
        ("gsm8k", [GSM8K[0], {"question": " ", "answer": "1"}], "line 2: question is empty"),
        ("mt_bench", [{"prompt": [], "prompt_id": 1}], "line 1: prompt is empty"),
        ("mt_bench", [{"prompt": ["a"], "prompt_id": 1}, {"prompt": ["b"], "prompt_id": 1}], "line 2: question_id 1"),
        ("mt_bench", [{"question_id": 1, "turns": []}], "line 1: turns is"),
    ],
)
def test_bad_rows_are_named(tmp_path, name, rows, message):
    write(tmp_path / f"{name}.jsonl", rows)
    with pytest.raises(InputError, match=message):
        load_workload(name, tmp_path)


def test_absent_workloads_are_told(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="expected one of mt_bench, gsm8k"):
        load_workload("hellaswag")
    with pytest.raises(InputError, match=r"no gsm8k\.jsonl"):
        load_workload("gsm8k", tmp_path)
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: (_ for _ in ()).throw(ConnectionError("down")))
    with pytest.raises(InputError, match="openai/gsm8k.: down; --data_dir=FOLDER reads gsm8k.jsonl"):
        load_workload("gsm8k")


@pytest.mark.skipif("TAPS_JAX_BENCHMARKS" not in os.environ, reason="TAPS_JAX_BENCHMARKS names no folder")
@pytest.mark.parametrize(("name", "count"), [("mt_bench", 80), ("gsm8k", 1319), ("math_500", 500), ("svamp", 300)])
def test_the_benchmarks_own_questions(name, count):
    assert len(load_workload(name, Path(os.environ["TAPS_JAX_BENCHMARKS"]))) == count
