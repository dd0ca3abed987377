"""SmolLM2's tokenizer, built from its GGUF file, against ids that llama.cpp gives for the same texts."""

import json
from pathlib import Path

import pytest

from taps_jax.data.tokenize import encode_conversation, encode_prompt
from taps_jax.errors import InputError

GOLDEN = [json.loads(line) for line in (Path(__file__).parent / "smollm2_token_ids.jsonl").read_text().splitlines()]
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return smollm2.tokenizer


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_ids_equal_llama_cpp(tokenizer):
    assert len(GOLDEN) >= 40
    different = [row["text"] for row in GOLDEN if encode(tokenizer, row["text"]) != row["ids"]]
    assert not different


def test_decoding_gives_the_text_back(tokenizer):
    # U+0004 and U+0016 have no token in this vocabulary; llama.cpp drops them as well.
    texts = [row["text"] for row in GOLDEN if not {"\x04", "\x16"} & set(row["text"])]
    assert len(texts) == len(GOLDEN) - 1
    different = [text for text in texts if tokenizer.decode(encode(tokenizer, text)) != text]
    assert not different


def test_special_tokens_are_single_ids(tokenizer):
    specials = tokenizer.convert_ids_to_tokens(range(17))
    assert specials[:5] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>"]
    assert encode(tokenizer, "".join(specials)) == list(range(17))
    for index, text in enumerate(specials):
        inside = encode(tokenizer, f"a{text}b")
        assert inside == [encode(tokenizer, "a")[0], index, encode(tokenizer, "b")[0]]
    assert tokenizer.decode(range(17), skip_special_tokens=True) == ""
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_digits_are_tokens_of_their_own(tokenizer):
    assert len(encode(tokenizer, "1234567890")) == 10
    # The space before a number is a token too, so that every number's first digit is the same token.
    assert encode(tokenizer, "in 2024") == encode(tokenizer, "in") + encode(tokenizer, " ") + encode(tokenizer, "2024")


def test_chat_template_writes_chatml(tokenizer):
    messages = [{"role": "user", "content": "What is 12 * 7?"}]
    text = SYSTEM + "<|im_start|>user\nWhat is 12 * 7?<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == text
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == text + "<|im_start|>assistant\n"
    assert encode_prompt(tokenizer, messages) == tuple(encode(tokenizer, prompt))
    own = [{"role": "system", "content": "Be brief."}, *messages, {"role": "assistant", "content": "84"}]
    assert tokenizer.apply_chat_template(own, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is 12 * 7?<|im_end|>\n"
        "<|im_start|>assistant\n84<|im_end|>\n"
    )


def test_prompt_has_one_begin_of_turn_per_message(tokenizer):
    ids = encode_prompt(tokenizer, [{"role": "user", "content": "Hi"}])
    assert ids[0] == 1
    assert (ids.count(1), ids.count(2)) == (3, 2)  # system, user and the opened answer


def test_answer_ends_with_the_stop_token(smollm2):
    turns = [{"role": "user", "content": "7 * 12?"}, {"role": "assistant", "content": "84 <|im_start|>"}]
    encoded = encode_conversation(smollm2.tokenizer, turns, smollm2.stop_tokens)
    assert smollm2.tokenizer.decode(encoded.tokens[encoded.answer]) == "84 <|im_start|><|im_end|>"


def test_stop_tokens(smollm2):
    assert smollm2.stop_tokens == (2,)
    assert smollm2.tokenizer.decode([2]) == "<|im_end|>"


def test_a_prompt_needs_a_chat_template(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(InputError, match="no chat template"):
        encode_prompt(tokenizer, [{"role": "user", "content": "Hi"}])
