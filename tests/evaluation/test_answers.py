"""Results of answers, and answers that loop."""

import pytest

from taps_jax.data.questions import Question
from taps_jax.evaluation.answers import is_correct
from taps_jax.evaluation.loops import is_looping, repeated_share


@pytest.mark.parametrize(
    ("reference", "answer", "correct"),
    [
        ("Janet has 3 + 4 = <<3+4=7>>7.\n#### 1,250", "So in the end it is $1250.", True),
        ("#### 18", "First 18, and then 9.", False),
        ("27", "The answer is 27, since 62 - 35 = 27 (not 26).", True),
        ("27", "There are 27.0 birds", True),
        ("27", "", False),
        ("3.0", "He has 3 pens.", True),
        ("We get $\\boxed{\\frac{3}{4}}$.", "Thus \\boxed{0.75}", True),
        ("\\frac{1}{9}", "The probability is 4/36", True),
        ("\\frac{1}{9}", "so it is \\boxed{\\dfrac{1}{9}}.", True),
        ("14\\pi", "\\boxed{14 \\pi}", True),
        ("14\\pi", "\\boxed{14}", False),
        ("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "It is \\boxed{(3,\\frac{\\pi}{2})}", True),
        ("90^\\circ", "\\boxed{90}", True),
        ("5", "\\boxed{5", True),
    ],
)
def test_results(reference, answer, correct):
    assert is_correct(Question(1, "", ("?",), (reference,)), answer) is correct


def test_questions_without_a_single_reference_have_no_verdict():
    assert is_correct(Question(1, "", ("?",)), "5") is None
    assert is_correct(Question(1, "", ("?", "and?"), ("5", "6")), "5") is None


def test_repeated_share_is_of_8_grams():
    assert repeated_share(range(7)) == 0
    assert repeated_share(range(100)) == 0
    assert repeated_share([1] * 10) == pytest.approx(2 / 3)  # three 8-grams, one kind
    once = list(range(20))
    assert repeated_share(once + once) == pytest.approx(13 / 33)  # 33 8-grams; 13 of them lie in the second copy
    assert is_looping(once + once) and not is_looping(once + once[:12])  # 5 of 25
