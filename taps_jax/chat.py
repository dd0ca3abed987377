"""Rendering conversations with a tokenizer's own chat template."""

from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from taps_jax.errors import InputError


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], add_generation_prompt: bool) -> str:
    """The text of `messages`, with every special token that the template writes.

    Raises:
      InputError: the tokenizer has no chat template, or the template fails or refuses these messages.
    """
    if not tokenizer.chat_template:
        raise InputError("the verifier's tokenizer has no chat template")
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except TemplateError as error:
        raise InputError(f"the verifier's chat template fails: {error}") from error
