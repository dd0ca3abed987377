"""Whether an answer gives the reference's result: GSM8K, SVAMP and MATH kinds of questions."""

import re
from fractions import Fraction

from taps_jax.data.questions import Question

_NUMBER = r"-?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?"


def is_correct(question: Question, answer: str) -> bool | None:
    """Whether `answer` ends with the question's reference result; None where there is no reference of that kind.

    The result of an answer is what its last \\boxed{} holds, else what follows "####" or "answer is", else its last
    number; compared as numbers where both are, else as text without spaces and LaTeX ornaments.
    """
    if len(question.turns) != 1 or len(question.reference) != 1:
        return None
    expected = final_result(question.reference[0], short=True)
    found = final_result(answer)
    return found is not None and _same(found, expected)


def final_result(text: str, short: bool = False) -> str | None:
    """The result that a text ends with, None if it has none.

    Args:
      text: an answer or a worked solution.
      short: a text without a marked result is the result itself.
    """
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    marked = re.findall(r"####\s*(.+)", text) or re.findall(rf"answer is:?\s*\$?({_NUMBER})", text, re.IGNORECASE)
    if marked:
        return marked[-1].strip()
    if short:
        return text.strip()
    numbers = re.findall(_NUMBER, text)
    return numbers[-1] if numbers else None


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[start + len("\\boxed{") : end]
    return None


def _same(found: str, expected: str) -> bool:
    numbers = _as_number(found), _as_number(expected)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return _plain(found) == _plain(expected)


def _plain(text: str) -> str:
    """Without what LaTeX or a sentence adds around a result."""
    text = re.sub(r"\\(?:left|right|!|,|;|text|mathrm|displaystyle)", "", text).replace("\\dfrac", "\\frac")
    text = text.replace("\\$", "").replace("$", "").replace("\\%", "").replace("%", "").replace("^\\circ", "")
    return re.sub(r"\s", "", text).rstrip(".")


def _as_number(text: str) -> Fraction | None:
    plain = _plain(text).replace(",", "")
    fraction = re.fullmatch(r"(-?)\\frac\{?(\d+)\}?\{?(\d+)\}?", plain)
    if fraction:
        plain = f"{fraction[1]}{fraction[2]}/{fraction[3]}"
    try:
        return Fraction(plain)
    except (ValueError, ZeroDivisionError):
        return None
