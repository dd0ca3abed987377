"""Readers that say where and what is wrong, files that appear whole or not at all, and the shipped questions."""

import json
import re

import pytest

from taps_jax.data.jsonl import read_rows, write_rows
from taps_jax.data.questions import Question, read_questions
from taps_jax.errors import InputError
from taps_jax.files import replacing

QUESTION = {"question_id": 1, "turns": ["a"]}


def write_lines(path, *lines) -> str:
    """Objects become JSON; strings are written as they are."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def check_refused(reader, path, message: str) -> None:
    """The message begins with the file, and has `message` word for word."""
    with pytest.raises(InputError) as caught:
        list(reader(path))
    assert str(caught.value).startswith(str(path)) and message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ", line 3: not valid JSON: Expecting property name"),
        ('{"a": 1} {"b": 2}', ", line 3: not valid JSON: Extra data"),
        ("[1]", ", line 3: expected a JSON object, found list"),
        ("null", ", line 3: expected a JSON object, found NoneType"),
        ('"text"', ", line 3: expected a JSON object, found str"),
    ],
)
@pytest.mark.parametrize("reader", [read_rows, read_questions])
def test_lines_that_are_not_objects(tmp_path, reader, line, message):
    path = tmp_path / "some.jsonl"
    write_lines(path, QUESTION, "  ", line)  # blank lines are skipped, and counted
    check_refused(reader, path, message)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"turns": ["a"]}, "question_id is None, expected a number or a string"),
        ({"question_id": [1], "turns": ["a"]}, "question_id is [1], expected a number or a string"),
        ({"question_id": True, "turns": ["a"]}, "question_id is True, expected a number or a string"),
        ({"question_id": 2}, "turns is None, expected a list of at least one string"),
        ({"question_id": 2, "turns": []}, "turns is [], expected a list of at least one string"),
        ({"question_id": 2, "turns": "text"}, "turns is 'text', expected a list of at least one string"),
        ({"question_id": 2, "turns": ["a", " "]}, "turns holds an item that is not a string or is empty"),
        ({"question_id": 2, "turns": ["a", 5]}, "turns holds an item that is not a string or is empty"),
    ],
)
def test_bad_questions(tmp_path, row, message):
    path = tmp_path / "questions.jsonl"
    write_lines(path, QUESTION, row)
    check_refused(read_questions, path, f", line 2: {message}")


def test_a_repeated_question_names_both_lines(tmp_path):
    path = tmp_path / "questions.jsonl"
    write_lines(path, QUESTION, {**QUESTION, "question_id": 2}, QUESTION)
    check_refused(read_questions, path, f", line 3: question_id 1 was already used in {path}, line 1")


def test_questions_are_read_whole(tmp_path):
    path = tmp_path / "questions.jsonl"
    write_lines(path, QUESTION, {"question_id": "x", "category": "é", "turns": ["b", "c"], "reference": ["7", "8"]})
    assert read_questions(path) == [Question(1, "", ("a",)), Question("x", "é", ("b", "c"), ("7", "8"))]


@pytest.mark.parametrize("value", ["42", 42])
def test_a_reference_must_be_a_list(tmp_path, value):
    """A string would otherwise be taken apart into its characters."""
    path = tmp_path / "questions.jsonl"
    write_lines(path, {**QUESTION, "reference": value})
    check_refused(read_questions, path, f", line 1: reference is {value!r}")


def test_empty_absent_and_undecodable_files(tmp_path):
    reader = read_questions
    write_lines(tmp_path / "empty.jsonl", "", "  ")
    check_refused(reader, tmp_path / "empty.jsonl", "empty.jsonl: no questions found")
    check_refused(reader, tmp_path / "absent.jsonl", "absent.jsonl: cannot be read: ")
    check_refused(reader, tmp_path, ": cannot be read: ")
    (tmp_path / "latin.jsonl").write_bytes('{"é": 1}'.encode("latin-1"))
    check_refused(reader, tmp_path / "latin.jsonl", "latin.jsonl: cannot be read: ")


# Line breaks to Unicode but not to JSON lines: json.dumps writes the last three as they are.
SEPARATORS = ["\n", "\r\n", "\x0b", "\x1c", "\x85", "\u2028", "\u2029"]


@pytest.mark.parametrize("separator", SEPARATORS, ids=ascii)
def test_rows_of_any_text_round_trip(tmp_path, separator):
    path, rows = tmp_path / "deep" / "rows.jsonl", [{"a": f"é{separator}b"}, {"b": 2}]
    write_rows(path, rows)
    assert list(read_rows(path)) == [(f"{path}, line {number}", row) for number, row in enumerate(rows, 1)]


def test_an_error_leaves_the_old_file_and_nothing_half_written(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("half")
        assert temporary.parent == path.parent and not path.exists()
        raise KeyboardInterrupt
    assert list(path.parent.iterdir()) == []
    write_rows(path, [{"a": 1}])

    def failing():
        yield {"b": 2}
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_rows(path, failing())
    assert [file.name for file in path.parent.iterdir()] == ["rows.jsonl"]
    assert path.read_text() == '{"a": 1}\n'


def test_a_file_appears_only_when_the_block_ends(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


def words(text: str) -> str:
    """Text without case, spacing and punctuation."""
    return " ".join(re.findall(r"\w+", text.lower()))


def test_shipped_questions_are_distinct(questions_dir):
    files = {path.stem: read_questions(path) for path in questions_dir.glob("*.jsonl")}
    assert {name: len(questions) for name, questions in files.items()} == {
        "math_train": 100,
        "chat_train": 100,
        "math_heldout": 12,
        "chat_heldout": 12,
        "math_train_more": 350,
        "chat_train_more": 350,
        "mini_mt_bench": 24,
        "mini_gsm8k": 24,
        "mini_math_500": 25,
        "mini_svamp": 25,
    }
    everything = [question for questions in files.values() for question in questions]
    assert len({question.question_id for question in everything}) == len(everything)
    turns = {
        kind: [
            words(turn)
            for name, questions in files.items()
            if ("_train" in name) == (kind == "trained on")
            for question in questions
            for turn in question.turns
        ]
        for kind in ("trained on", "evaluated on")
    }
    assert not set(turns["trained on"]) & set(turns["evaluated on"])
    assert all(len(set(texts)) == len(texts) for texts in turns.values())
    for name, questions in files.items():
        assert all(question.category for question in questions)
        if name in ("math_train", "math_heldout"):
            assert all(question.reference for question in questions)
