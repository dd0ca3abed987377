"""From sources of conversations to rows to train on, with an account of what was left out and why."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from taps_jax.data.batches import Example, to_example
from taps_jax.data.conversations import Counts
from taps_jax.data.sources import read_mixture
from taps_jax.data.tokenize import encode_conversation
from taps_jax.errors import InputError
from taps_jax.files import replacing

_REWRITTEN = "the chat template rewrites earlier turns"


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Rows to train on.

    Attributes:
      examples: the rows.
      counts: of the conversations they come from.
      cut: rows that lost their end.
    """

    examples: list[Example]
    counts: Counts
    cut: int

    @property
    def supervised(self) -> int:
        """Positions that are trained."""
        return sum(int(example.supervised.sum()) for example in self.examples)

    def account(self) -> str:
        """What was read, repaired and dropped, a line each."""
        table = self.counts.table()
        return f"{table}\n  {self.cut:>9,}  cut to the maximal length\n  {self.supervised:>9,}  supervised tokens"


def load_examples(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    stop_tokens: tuple[int, ...],
    max_length: int,
    system_prompt: str = "",
    seed: int = 0,
) -> Dataset:
    """Reads, cleans and tokenizes conversations.

    Args:
      sources: files, datasets or mixtures, as `read_mixture` takes them.
      tokenizer: with a chat template.
      stop_tokens: ids that end an answer.
      max_length: tokens of a row; the end of longer ones is cut off.
      system_prompt: for conversations without a system message; empty adds none.
      seed: of the draws of a mixture.
    Raises:
      InputError: there are no sources, one cannot be read, or no row has an answer.
    """
    if not sources:
        raise InputError("data.conversations is empty, give at least one file, dataset or mixture")
    examples, counts, cut = [], Counts(), 0
    for source in sources:
        for conversation in read_mixture(source, seed, counts):
            messages = conversation.messages
            if system_prompt and messages[0]["role"] != "system":
                messages = ({"role": "system", "content": system_prompt}, *messages)
            encoded = encode_conversation(tokenizer, messages, stop_tokens, conversation.complete)
            example = encoded and to_example(encoded, max_length)
            if example:
                examples.append(example)
                cut += len(encoded.tokens) > max_length
            else:
                counts.kept -= 1
                counts.dropped[_REWRITTEN if encoded is None else f"no answer within {max_length} tokens"] += 1
    if not examples:
        raise InputError(f"{', '.join(sources)}: no conversation to train on:\n{counts.table()}")
    return Dataset(examples, counts, cut)


def write_account(path: Path, dataset: Dataset, sources: Sequence[str]) -> None:
    """Stores the account as JSON."""
    fields: dict[str, Any] = {
        "sources": list(sources),
        "read": dataset.counts.read,
        "kept": dataset.counts.kept,
        "repaired": dict(dataset.counts.repaired),
        "dropped": dict(dataset.counts.dropped),
        "cut": dataset.cut,
        "supervised": dataset.supervised,
    }
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(fields, indent=2) + "\n")
