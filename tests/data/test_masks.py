"""Which tokens of a conversation are the assistant's: golden masks, and the cases that go wrong elsewhere."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from taps_jax.data.tokenize import encode_conversation, encode_prompt
from taps_jax.errors import InputError

LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>' + '\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
TURNS = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello you"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long"},
]


@pytest.fixture(scope="module")
def llama3() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with Llama 3's special tokens and template; its end of sequence is not its end of turn."""
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({text: index for index, text in enumerate(special + alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=special[0], eos_token=special[1], chat_template=LLAMA3
    )


def answers(tokenizer, encoded) -> list[str]:
    """Runs of answer tokens, as text."""
    runs, open_run = [], []
    for token, mine in zip([*encoded.tokens.tolist(), 0], [*encoded.answer.tolist(), False], strict=True):
        if mine:
            open_run.append(token)
        elif open_run:
            runs.append("".join(tokenizer.convert_ids_to_tokens(open_run)).replace("Ġ", " "))
            open_run = []
    return runs


def test_chatml_golden_mask(smollm2):
    encoded = encode_conversation(smollm2.tokenizer, TURNS[:2], smollm2.stop_tokens)
    tokens = smollm2.tokenizer.convert_ids_to_tokens(encoded.tokens.tolist())
    golden = [
        (["<|im_start|>", "system", "Ċ", "You", "Ġare", "Ġa", "Ġhelpful", "ĠAI", "Ġassistant", "Ġnamed"], 0),
        (["ĠSm", "ol", "LM", ",", "Ġtrained", "Ġby", "ĠH", "ugging", "ĠFace", "<|im_end|>", "Ċ"], 0),
        (["<|im_start|>", "user", "Ċ", "Hi", "Ġthere", "<|im_end|>", "Ċ", "<|im_start|>", "ass", "istant", "Ċ"], 0),
        (["Hello", "Ġyou", "<|im_end|>"], 1),
        (["Ċ"], 0),
    ]
    assert tokens == [token for run, _ in golden for token in run]
    assert encoded.answer.tolist() == [bool(mine) for run, mine in golden for _ in run]


def test_llama3_has_one_bos_and_an_end_of_turn_after_every_answer(llama3):
    encoded = encode_conversation(llama3, TURNS, (1, 4))
    assert encoded.tokens.tolist().count(0) == 1 and encoded.tokens[0] == 0
    assert answers(llama3, encoded) == ["Hello you<|eot_id|>", "So long<|eot_id|>"]


def test_system_text_is_not_trained(llama3, smollm2):
    messages = [{"role": "system", "content": "Be brief."}, *TURNS]
    assert answers(llama3, encode_conversation(llama3, messages, (1, 4))) == [
        "Hello you<|eot_id|>",
        "So long<|eot_id|>",
    ]
    found = answers(smollm2.tokenizer, encode_conversation(smollm2.tokenizer, messages, smollm2.stop_tokens))
    assert found == ["Hello you<|im_end|>", "So long<|im_end|>"]


@pytest.mark.parametrize("marker", ["<|im_end|>", "<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>user\nHi"])
def test_markers_in_an_answer_do_not_end_it(smollm2, marker):
    messages = [TURNS[0], {"role": "assistant", "content": f"a{marker}b"}, *TURNS[2:]]
    encoded = encode_conversation(smollm2.tokenizer, messages, smollm2.stop_tokens)
    found = answers(smollm2.tokenizer, encoded)
    assert found == [f"a{marker}b<|im_end|>".replace("\n", "Ċ"), "So long<|im_end|>"]


def test_a_cut_answer_ends_with_its_text(smollm2):
    whole = encode_conversation(smollm2.tokenizer, TURNS, smollm2.stop_tokens)
    cut = encode_conversation(smollm2.tokenizer, TURNS, smollm2.stop_tokens, complete=False)
    assert answers(smollm2.tokenizer, cut) == ["Hello you<|im_end|>", "So long"]
    assert cut.tokens.tolist() == whole.tokens.tolist()[: len(cut.tokens)] and cut.answer[-1]


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_padding_side_does_not_matter(smollm2, side):
    tokenizer = smollm2.tokenizer
    before = tokenizer.padding_side
    tokenizer.padding_side = side
    try:
        assert encode_conversation(tokenizer, TURNS, smollm2.stop_tokens).answer.sum() == 6
    finally:
        tokenizer.padding_side = before


def test_a_prompt_is_what_training_rows_begin_with(smollm2):
    prompt = encode_prompt(smollm2.tokenizer, TURNS[:3])
    whole = encode_conversation(smollm2.tokenizer, TURNS, smollm2.stop_tokens).tokens
    assert prompt == tuple(whole[: len(prompt)].tolist())


def test_templates_that_rewrite_earlier_turns_are_noticed(llama3):
    forgetful = PreTrainedTokenizerFast(tokenizer_object=llama3.backend_tokenizer, eos_token="<|end_of_text|>")
    forgetful.chat_template = "{% for m in messages[-2:] %}{{ m['content'] }}<|eot_id|>{% endfor %}"
    assert encode_conversation(forgetful, TURNS, (4,)) is None


@pytest.mark.parametrize(
    ("template", "message"),
    [(None, "no chat template"), ("{{ raise_exception('roles!') }}", "roles!"), ("{% for %}", "chat template fails")],
)
def test_missing_and_failing_templates(llama3, template, message):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=llama3.backend_tokenizer, chat_template=template)
    with pytest.raises(InputError, match=message):
        encode_prompt(tokenizer, TURNS[:1])
