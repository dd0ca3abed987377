"""Conversations from every published form: what is repaired, what is dropped, and that every row is accounted for."""

import json
import re

import pyarrow
import pyarrow.parquet
import pytest

from taps_jax.data.conversations import Conversation, Counts, clean
from taps_jax.data.examples import load_examples, write_account
from taps_jax.data.sources import Part, parsed_mixture, read_mixture, read_source
from taps_jax.errors import InputError
from taps_jax.training.config import PAPER_DATA, base_config, with_paper_data
from tests.checkpoints.test_verifier import EOT, LLAMA3_TEMPLATE, make_tokenizer

USER, ASSISTANT, SYSTEM = ({"role": role, "content": role[0]} for role in ("user", "assistant", "system"))
EMPTY = {"role": "assistant", "content": " "}


def cleaned(*rows) -> tuple[list[Conversation], Counts]:
    counts = Counts()
    return list(clean(rows, counts)), counts


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"messages": [{**USER, "role": "Human"}, {**ASSISTANT, "weight": 1}], "id": 3},
        {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]},
        {"conversations": [{"from": "user", "value": "u"}, {"from": "chatgpt", "value": "a"}]},
        {"instruction": "u", "output": "a"},
        {"instruction": "u", "input": "", "output": "a", "source": "x"},
    ],
)
def test_published_forms(row):
    found, counts = cleaned(row)
    assert found == [Conversation((USER, ASSISTANT))]
    assert (counts.read, counts.kept, counts.repaired, counts.dropped) == (1, 1, {}, {})


def test_an_instruction_with_an_input_is_one_question():
    found, _ = cleaned({"instruction": "Add.", "input": "1 2", "output": "3"})
    assert found[0].messages[0]["content"] == "Add.\n\n1 2"


@pytest.mark.parametrize(
    ("messages", "expected", "repairs"),
    [
        ([ASSISTANT, USER, ASSISTANT], [USER, ASSISTANT], ["opening answer without a question left out"]),
        (
            [SYSTEM, ASSISTANT, USER, ASSISTANT],
            [SYSTEM, USER, ASSISTANT],
            ["opening answer without a question left out"],
        ),
        ([USER, ASSISTANT, USER], [USER, ASSISTANT], ["question without an answer at the end left out"]),
        ([USER, USER, ASSISTANT], [{**USER, "content": "u\n\nu"}, ASSISTANT], ["neighbours of one role joined"]),
        (
            [USER, ASSISTANT, ASSISTANT],
            [USER, {**ASSISTANT, "content": "a\n\na"}],
            ["neighbours of one role joined"],
        ),
        (
            [USER, ASSISTANT, USER, EMPTY],
            [USER, ASSISTANT],
            ["empty message at the end left out", "question without an answer at the end left out"],
        ),
    ],
)
def test_repairs(messages, expected, repairs):
    found, counts = cleaned({"messages": messages})
    assert found == [Conversation(tuple(expected))]
    assert counts.repaired == dict.fromkeys(repairs, 1) and counts.kept == 1 and not counts.dropped


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "no messages"),
        ({"messages": [EMPTY]}, "no messages"),
        ({"messages": [SYSTEM]}, "no answer"),
        ({"messages": [ASSISTANT]}, "no answer"),
        ({"messages": [USER]}, "no answer"),
        ({"messages": [SYSTEM, ASSISTANT]}, "no answer"),
        ({"messages": [USER, EMPTY, USER, ASSISTANT]}, "empty message inside"),
        ({"messages": [USER, SYSTEM, ASSISTANT]}, "system message that is not first"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "unknown role"),
        ({"messages": [USER, {"content": "x"}]}, "unknown role"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "a message is not text"),
        ({"messages": [USER, {"role": "assistant", "content": 5}]}, "a message is not text"),
        ({"messages": [USER, "text"]}, "a message is not an object"),
        ({"messages": "text"}, "messages are not a list"),
        ({"instruction": 3, "output": "a"}, "a message is not text"),
        ({"text": "a"}, "neither messages, conversations nor instruction and output"),
        ({"messages": [USER, ASSISTANT], "complete": "false"}, "complete is neither true nor false"),
        ("{broken", "not an object"),
        (None, "not an object"),
    ],
)
def test_what_is_dropped_and_why(row, reason):
    found, counts = cleaned(row, {"messages": [USER, ASSISTANT]})
    assert found == [Conversation((USER, ASSISTANT))]
    assert counts.dropped == {reason: 1} and (counts.read, counts.kept) == (2, 1)
    assert re.search(rf"\b1  dropped: {reason}", counts.table())


def test_a_cut_answer_that_is_not_the_last_is_whole():
    found, _ = cleaned({"messages": [USER, ASSISTANT, USER], "complete": False})
    assert found[0].complete
    found, _ = cleaned({"messages": [USER, ASSISTANT], "complete": False})
    assert not found[0].complete


def rows_of(count: int) -> list[dict]:
    return [{"instruction": f"q{number}", "output": f"a{number}"} for number in range(count)]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_local_files(suffix, tmp_path):
    path, rows = tmp_path / f"rows.{suffix}", rows_of(3)
    if suffix == "jsonl":
        path.write_text("\n\n".join(map(json.dumps, rows)))
    elif suffix == "json":
        path.write_text(json.dumps(rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert list(read_source(str(path))) == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.jsonl", None, "cannot be read"),
        ("rows.json", "{", "cannot be read"),
        ("rows.json", "{}", "expected a list of rows, found dict"),
        ("rows.parquet", "x", "cannot be read"),
        ("rows.csv", "a,b", "expected a file that ends in .jsonl, .json, .parquet"),
    ],
)
def test_bad_files(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError) as error:
        read_source(str(tmp_path / name))
    assert str(error.value).startswith(str(tmp_path / name)) and message in str(error.value)


def test_a_wrong_name_says_what_was_expected(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="'mathinstruct' is not a file .* and as a dataset TIGER-Lab/MathInstruct"):
        read_source("mathinstruct")


def test_mixtures_are_parsed():
    assert parsed_mixture("a.jsonl") == [Part("a.jsonl", None)]
    assert parsed_mixture("sharegpt:35000+ mathinstruct:70") == [Part("sharegpt", 35000), Part("mathinstruct", 70)]
    for bad in ("", "a+", "a:0"):
        with pytest.raises(InputError, match="expected SOURCE:COUNT"):
            parsed_mixture(bad)


def test_mixtures_draw_by_count_from_the_seed(tmp_path):
    for name in ("one", "two"):
        rows = [*rows_of(20), {"text": "unusable"}]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = f"{tmp_path / 'one.jsonl'}:5+{tmp_path / 'two.jsonl'}:7"
    draw = lambda seed: [conversation.messages[0]["content"] for conversation in read_mixture(text, seed, Counts())]
    first = draw(0)
    assert first == draw(0) != draw(1)
    assert len(set(first[:5])) == 5 and len(set(first[5:])) == 7 and len(first) == 12
    with pytest.raises(InputError, match=r"21 conversations asked for, 20 of 21 rows are usable"):
        list(read_mixture(f"{tmp_path / 'one.jsonl'}:21", 0, Counts()))


def test_a_file_without_conversations_says_why(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n[]\n")
    with pytest.raises(InputError, match=r"no usable conversation found:\n(.|\n)*1  dropped: not an object"):
        list(read_mixture(str(tmp_path / "rows.jsonl"), 0, Counts()))


def encoded(tmp_path, rows, **settings):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = make_tokenizer(LLAMA3_TEMPLATE)
    settings = {"max_length": 64, **settings}
    return load_examples([str(tmp_path / "rows.jsonl")], tokenizer, (EOT,), **settings), tokenizer


def test_every_row_is_accounted_for(tmp_path):
    x = {"role": "assistant", "content": "x x x x"}
    rows = [
        {"messages": [USER, x]},
        {"messages": [{**USER, "content": "x " * 100}, x]},
        {},
        {"messages": [USER, x] * 20},
    ]
    dataset, _ = encoded(tmp_path, rows)
    counts = dataset.counts
    assert counts.read == len(rows) == counts.kept + sum(counts.dropped.values())
    assert counts.dropped["no answer within 64 tokens"] == 1 and len(dataset.examples) == counts.kept == 2
    assert dataset.cut == 1
    write_account(tmp_path / "data.json", dataset, ["rows.jsonl"])
    stored = json.loads((tmp_path / "data.json").read_text())
    assert stored["read"] == 4 and stored["supervised"] == dataset.supervised and stored["cut"] == 1
    assert "4  rows read" in dataset.account()


def test_a_system_prompt_goes_where_none_is(tmp_path):
    x = {"role": "assistant", "content": "x x x"}
    own = {"role": "system", "content": "~ ~"}
    dataset, tokenizer = encoded(tmp_path, [{"messages": [USER, x]}, {"messages": [own, USER, x]}], system_prompt="x")
    first, second = (tokenizer.decode(example.tokens).split("<|header|>") for example in dataset.examples)
    assert len(first) == len(second) == 7  # three messages each, and what is before them
    assert first[2].split() == ["x", "<|eot|>"] and second[2].split() == ["~", "~", "<|eot|>"]


def test_the_papers_training_sets():
    assert set(PAPER_DATA) == {"math70k", "sharegpt70k", "mixed35k", "mixed70k"}
    plain = with_paper_data(base_config(), "mixed35k")
    assert plain.data.conversations == ("sharegpt:35000+mathinstruct:35000",) and not plain.drafter.fc_bias
    original = with_paper_data(base_config(), "math70k:original")
    assert original.drafter.fc_bias and original.objective.zero_logit_mask
    assert with_paper_data(base_config(), "original").data.conversations == ()
    for bad in ("math", "math70k:x", "original:math70k"):
        with pytest.raises(ValueError, match="expected math70k, sharegpt70k"):
            with_paper_data(base_config(), bad)
