"""Readers that name the bad line, batches that resume exactly, and draft vocabularies."""

import itertools
import json

import numpy as np
import pytest

from taps_jax.data.batches import batch_rows, pad_rows, to_example
from taps_jax.data.conversations import read_conversations
from taps_jax.data.jsonl import read_rows, write_rows
from taps_jax.data.questions import read_questions
from taps_jax.data.tokenize import Encoded
from taps_jax.data.vocabulary import frequent_tokens, uncovered_share
from taps_jax.errors import InputError
from taps_jax.files import replacing

GOOD = '{"question_id": 1, "turns": ["a"]}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: not valid JSON"),
        ("[1]", "line 3: expected a JSON object, found list"),
        ('{"turns": ["a"]}', "line 3: question_id is None, expected a number or a string"),
        ('{"question_id": true, "turns": ["a"]}', "line 3: question_id is True, expected a number or a string"),
        (GOOD, "line 3: question_id 1 was already used in .*line 1"),
        ('{"question_id": 2, "turns": []}', r"line 3: turns is \[\], expected a list of at least one string"),
        ('{"question_id": 2, "turns": ["a", " "]}', "line 3: turns holds an item that is not a string or is empty"),
    ],
)
def test_bad_questions_name_the_line(tmp_path, line, message):
    path = tmp_path / "questions.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(InputError, match=f"questions.jsonl, {message}"):
        read_questions(path)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "expected a list of role/content objects"),
        ([{"role": "user"}], "expected an object with strings role and content"),
        ([{"role": "assistant", "content": "a"}], "roles are .'assistant'., expected user and assistant in turn"),
        ([{"role": "system", "content": "a"}], "roles are .'system'."),
        ([{"role": "user", "content": "a"}] * 2, "roles are .'user', 'user'."),
    ],
)
def test_bad_conversations_name_the_line(tmp_path, messages, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    with pytest.raises(InputError, match=f"rows.jsonl, line 1: .*{message}"):
        read_conversations(path)


@pytest.mark.parametrize("reader", [read_questions, read_conversations])
def test_empty_and_absent_files(tmp_path, reader):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="empty.jsonl: no (questions|conversations) found"):
        reader(tmp_path / "empty.jsonl")
    with pytest.raises(InputError, match="absent.jsonl: cannot be read"):
        reader(tmp_path / "absent.jsonl")


def test_rows_round_trip_and_nothing_half_written_remains(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    write_rows(path, [{"a": "é"}, {"b": 2}])
    assert [row for _, row in read_rows(path)] == [{"a": "é"}, {"b": 2}]
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert [file.name for file in path.parent.iterdir()] == ["rows.jsonl"]
    assert len(list(read_rows(path))) == 2


def test_shipped_questions_are_distinct(questions_dir):
    files = {path.stem: read_questions(path) for path in questions_dir.glob("*.jsonl")}
    assert {name: len(questions) for name, questions in files.items()} == {
        "math_train": 100,
        "chat_train": 100,
        "math_heldout": 12,
        "chat_heldout": 12,
    }
    everything = [question for questions in files.values() for question in questions]
    assert len({question.question_id for question in everything}) == len(everything)
    assert len({question.turns[0].lower() for question in everything}) == len(everything)


def test_batches_cover_an_epoch_once_and_resume_anywhere():
    batches = list(itertools.islice(batch_rows(11, 3, seed=4, position=0), 9))
    for epoch in range(3):
        rows = np.concatenate([rows for of, rows in batches if of == epoch])
        assert len(set(rows.tolist())) == 9  # the incomplete fourth batch is left out
    assert not np.array_equal(batches[0][1], batches[3][1])
    for position in range(8):
        epoch, rows = next(batch_rows(11, 3, seed=4, position=position))
        assert epoch == batches[position][0] and rows.tolist() == batches[position][1].tolist()
    assert next(batch_rows(11, 3, seed=5, position=0))[1].tolist() != batches[0][1].tolist()


def test_padding_and_cutting():
    assert pad_rows([np.array([1, 2]), np.array([3])], 3).tolist() == [[1, 2, 0], [3, 0, 0]]
    answer = np.array([0, 0, 1, 1, 1], bool)
    encoded = Encoded(np.arange(5, dtype=np.int32), answer)
    example = to_example(encoded, 4)
    assert example.tokens.tolist() == [0, 1, 2, 3] and example.supervised.tolist() == [False, True, False, False]
    assert to_example(encoded, 3) is None


def test_draft_vocabulary_by_hand():
    answers = [np.array([7, 7, 7, 5, 5, 9]), np.array([9, 5, 4])]
    # 5 and 7 occur three times, 9 twice, 4 once; 8 is a stop token; then the lowest ids fill up.
    assert frequent_tokens(answers, 3, (8,), 12).tolist() == [5, 7, 8]
    assert frequent_tokens(answers, 5, (8,), 12).tolist() == [4, 5, 7, 8, 9]
    assert frequent_tokens(answers, 7, (8,), 12).tolist() == [0, 1, 4, 5, 7, 8, 9]
    assert uncovered_share(answers, np.array([5, 7, 8])) == 3 / 9
    for size in (0, 13):
        with pytest.raises(InputError, match=f"draft vocabulary of {size} tokens, expected 1 to 12"):
            frequent_tokens(answers, size, (8,), 12)
