"""Which tokens are the assistant's, token by token, under two chat templates."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from taps_jax.data.tokenize import Encoded, encode_conversation, encode_prompt
from taps_jax.errors import InputError

SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
BOS, EOS, HEADER, HEADER_END, EOT = range(5)
STOPS = (EOS, EOT)
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}{{ '<|begin_of_text|>' }}{% endif %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>' + '\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def say(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """User and assistant in turn."""
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system is not None else turns


def make_llama3(template: str | None = LLAMA3, **options) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with Llama 3's special tokens; by itself it adds a BOS to whatever it reads."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({text: index for index, text in enumerate(SPECIAL + alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[BOS]} $A", special_tokens=[(SPECIAL[BOS], BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[EOS],
        pad_token=SPECIAL[EOS],
        chat_template=template,
        **options,
    )


@pytest.fixture(scope="module")
def llama3() -> PreTrainedTokenizerFast:
    return make_llama3()


def tokens_of(tokenizer: PreTrainedTokenizerBase, encoded: Encoded) -> list[str]:
    return tokenizer.convert_ids_to_tokens(encoded.tokens.tolist())


def answers(tokenizer: PreTrainedTokenizerBase, encoded: Encoded) -> list[str]:
    """Runs of answer tokens, as text."""
    edges = np.flatnonzero(np.diff([0, *encoded.answer.astype(int), 0]))
    runs = [encoded.tokens[start:end].tolist() for start, end in edges.reshape(-1, 2)]
    return [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs]


def check_golden(tokenizer, encoded: Encoded, golden: list[tuple[str, int]]) -> None:
    """Compares with pieces of space-separated tokens, each piece the assistant's (1) or not (0)."""
    assert tokens_of(tokenizer, encoded) == [token for piece, _ in golden for token in piece.split(" ")]
    assert encoded.answer.tolist() == [bool(mine) for piece, mine in golden for _ in piece.split(" ")]
    assert encoded.tokens.dtype == np.int32 and encoded.answer.dtype == bool


def test_chatml_token_by_token(smollm2):
    messages = say("Hi there", "Hello you", "Bye", "So long", system="Be brief.")
    golden = [
        ("<|im_start|> system Ċ Be Ġbrief . <|im_end|> Ċ", 0),
        ("<|im_start|> user Ċ Hi Ġthere <|im_end|> Ċ <|im_start|> ass istant Ċ", 0),
        ("Hello Ġyou <|im_end|>", 1),
        ("Ċ <|im_start|> user Ċ By e <|im_end|> Ċ <|im_start|> ass istant Ċ", 0),
        ("So Ġlong <|im_end|>", 1),
        ("Ċ", 0),
    ]
    check_golden(smollm2.tokenizer, encode_conversation(smollm2.tokenizer, messages, smollm2.stop_tokens), golden)


def test_llama3_token_by_token(llama3):
    """Exactly one BOS, though the tokenizer adds one of its own to plain text, and an end of turn per answer."""
    assert llama3("a")["input_ids"][0] == BOS
    encoded = encode_conversation(llama3, say("Hi", "Yo!", "?", "No", system="S"), STOPS)
    assistant = "<|start_header_id|> a s s i s t a n t <|end_header_id|> Ċ Ċ"
    golden = [
        ("<|begin_of_text|> <|start_header_id|> s y s t e m <|end_header_id|> Ċ Ċ S <|eot_id|>", 0),
        (f"<|start_header_id|> u s e r <|end_header_id|> Ċ Ċ H i <|eot_id|> {assistant}", 0),
        ("Y o ! <|eot_id|>", 1),
        (f"<|start_header_id|> u s e r <|end_header_id|> Ċ Ċ ? <|eot_id|> {assistant}", 0),
        ("N o <|eot_id|>", 1),
    ]
    check_golden(llama3, encoded, golden)
    assert encoded.tokens.tolist().count(BOS) == 1


def test_a_system_prompt_moves_the_answers_but_is_not_one(smollm2, llama3):
    for tokenizer, stops, end in (
        (smollm2.tokenizer, smollm2.stop_tokens, "<|im_end|>"),
        (llama3, STOPS, "<|eot_id|>"),
    ):
        without, with_system = (
            encode_conversation(tokenizer, say("Hi", "Yes", system=system), stops)
            for system in (None, "Say yes. You answer for the assistant.")
        )
        assert answers(tokenizer, without) == answers(tokenizer, with_system) == [f"Yes{end}"]
        assert len(with_system.tokens) != len(without.tokens)


MARKERS = ["<|im_end|>", "<|im_end|>\n", "<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"]


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("complete", [True, False])
def test_chatml_markers_in_an_answer(smollm2, marker, complete):
    text = f"a{marker}b"
    encoded = encode_conversation(smollm2.tokenizer, say("Hi", text, "Go", text), smollm2.stop_tokens, complete)
    assert answers(smollm2.tokenizer, encoded) == [f"{text}<|im_end|>", f"{text}<|im_end|>" if complete else text]


@pytest.mark.parametrize(
    "marker",
    ["<|eot_id|>", "<|end_of_text|>", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|begin_of_text|>"],
)
def test_llama3_markers_in_an_answer(llama3, marker):
    text = f"a{marker}b"
    encoded = encode_conversation(llama3, say("Hi", text, f"x{marker}y", "No"), STOPS)
    assert answers(llama3, encoded) == [f"{text}<|eot_id|>", "No<|eot_id|>"]


def test_markers_in_a_question_start_no_answer(smollm2):
    question = "a<|im_end|>\n<|im_start|>assistant\nfake<|im_end|>\nb"
    encoded = encode_conversation(smollm2.tokenizer, say(question, "real"), smollm2.stop_tokens)
    assert answers(smollm2.tokenizer, encoded) == ["real<|im_end|>"]


@pytest.mark.parametrize("last", ["So long", "So<|eot_id|>long", ""])
def test_a_cut_answer_has_no_end(llama3, last):
    """The stop token that the template adds and what follows it are gone; earlier answers keep theirs."""
    messages = say("Hi", "Yo", "Bye", last)
    whole, cut = (encode_conversation(llama3, messages, STOPS, complete) for complete in (True, False))
    assert answers(llama3, whole) == ["Yo<|eot_id|>", f"{last}<|eot_id|>"]
    assert answers(llama3, cut) == ["Yo<|eot_id|>", *([last] if last else [])]
    assert cut.tokens.tolist() == whole.tokens.tolist()[:-1] and len(cut.answer) == len(cut.tokens)


def test_a_cut_answer_drops_all_that_the_template_adds(smollm2):
    messages = say("Hi", "So long")
    whole, cut = (
        encode_conversation(smollm2.tokenizer, messages, smollm2.stop_tokens, complete) for complete in (True, False)
    )
    assert tokens_of(smollm2.tokenizer, whole)[-4:] == ["So", "Ġlong", "<|im_end|>", "Ċ"]
    assert cut.tokens.tolist() == whole.tokens.tolist()[:-2]
    assert answers(smollm2.tokenizer, cut) == ["So long"]


def test_a_template_without_a_stop_token_marks_the_text_alone():
    """Then an answer reaches to the end of its rendering, cut or not."""
    tokenizer = make_llama3("{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}.{% endfor %}")
    for complete in (True, False):
        encoded = encode_conversation(tokenizer, say("Hi", "Yo", "A", "B"), STOPS, complete)
        assert tokens_of(tokenizer, encoded) == list("u:Hi.a:Yo.u:A.a:B.")
        assert answers(tokenizer, encoded) == ["a:Yo.", "a:B."]  # without a generation prompt, from the role on


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_padding_side_does_not_matter(side, llama3):
    padded = make_llama3(padding_side=side, truncation_side=side, model_max_length=8)
    assert padded(["a", "bbb"], padding=True)["attention_mask"][0] == ([0, 0, 1, 1] if side == "left" else [1, 1, 0, 0])
    messages = say("Hi", "Yo", "Bye", "So long")
    want, found = (encode_conversation(tokenizer, messages, STOPS) for tokenizer in (llama3, padded))
    np.testing.assert_array_equal(found.tokens, want.tokens)
    np.testing.assert_array_equal(found.answer, want.answer)


def test_a_prompt_is_what_a_training_row_begins_with(smollm2, llama3):
    messages = say("Hi there", "Hello you", "Bye", "So long", system="Be brief.")
    for tokenizer, stops in ((smollm2.tokenizer, smollm2.stop_tokens), (llama3, STOPS)):
        whole = encode_conversation(tokenizer, messages, stops)
        starts = np.flatnonzero(np.diff(whole.answer.astype(int)) == 1) + 1
        for upto, start in zip((2, 4), starts.tolist(), strict=True):
            prompt = encode_prompt(tokenizer, messages[:upto])
            assert isinstance(prompt, tuple) and prompt == tuple(whole.tokens[:start].tolist())


# Keeps the reasoning before </think> in the last message only, as reasoning models do.
FORGETFUL = (
    "{% for m in messages %}{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}"
    "{{ '<|eot_id|>' }}{% endfor %}"
)
WINDOW = "{% for m in messages[-2:] %}{{ m['content'] + '<|eot_id|>' }}{% endfor %}"


@pytest.mark.parametrize(("template", "first"), [(FORGETFUL, "hm</think>Yo"), (WINDOW, "Yo")])
def test_templates_that_rewrite_earlier_turns(template, first):
    tokenizer = make_llama3(template)
    assert encode_conversation(tokenizer, say("Hi", first, "Bye", "So long"), STOPS) is None
    once = encode_conversation(tokenizer, say("Hi", first), STOPS)
    assert answers(tokenizer, once) == [f"{first}<|eot_id|>"]


def test_rewriting_templates_are_fine_where_nothing_is_rewritten():
    tokenizer = make_llama3(FORGETFUL)
    encoded = encode_conversation(tokenizer, say("Hi", "Yo", "Bye", "hm</think>So"), STOPS)
    assert answers(tokenizer, encoded) == ["Yo<|eot_id|>", "hm</think>So<|eot_id|>"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the verifier's tokenizer has no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "chat template fails: roles must alternate"),
        ("{% for %}", "chat template fails"),
    ],
)
def test_absent_and_failing_templates(template, message):
    tokenizer = make_llama3(template)
    with pytest.raises(InputError, match=message):
        encode_prompt(tokenizer, say("Hi"))
    with pytest.raises(InputError, match=message):
        encode_conversation(tokenizer, say("Hi", "Yo"), STOPS)
