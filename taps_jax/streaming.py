"""From the tokens of running answers to the pieces of text that are new."""

from collections.abc import Callable

from taps_jax.checkpoints.verifier import Verifier
from taps_jax.speculative.decode import StepRecord


class TextStream:
    """Turns the tokens of each answer so far into the text that is new, holding back incomplete characters."""

    def __init__(self, verifier: Verifier, on_text: Callable[[int, str], None]):
        self._decode = lambda tokens: verifier.tokenizer.decode(tokens, skip_special_tokens=True)
        self._on_text, self._shown = on_text, {}

    def __call__(self, index: int, tokens: tuple[int, ...], finished: bool) -> None:
        text = self._decode(tokens)
        if not finished:
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        shown = self._shown.get(index, 0)
        if len(text) > shown:
            self._on_text(index, text[shown:])
            self._shown[index] = len(text)


class OriginStream:
    """Tells for every token its text and whose it was; of an incomplete character the last token tells."""

    def __init__(self, verifier: Verifier, on_origin: Callable[[int, str, tuple[str, ...]], None], names: list[str]):
        self._decode = lambda tokens: verifier.tokenizer.decode(tokens, skip_special_tokens=True)
        self._on_origin, self._names = on_origin, names
        self._origins: dict[int, list[int]] = {}
        self._shown: dict[int, tuple[int, int]] = {}

    def note(self, index: int, record: StepRecord) -> None:
        """Remembers the origins of what a step committed."""
        self._origins.setdefault(index, [0]).extend(committed_origins(record))

    def __call__(self, index: int, tokens: tuple[int, ...], finished: bool) -> None:
        origins = self._origins.setdefault(index, [0])  # the first token is the prompt's own pass's
        done, shown = self._shown.get(index, (0, 0))
        for end in range(done + 1, len(tokens) + 1):
            text = self._decode(tokens[:end])
            if not (finished and end == len(tokens)) and text.endswith("\N{REPLACEMENT CHARACTER}"):
                continue
            if len(text) > shown:
                names = tuple(name for bit, name in enumerate(self._names) if origins[end - 1] >> bit & 1)
                self._on_origin(index, text[shown:], names)
            done, shown = end, max(shown, len(text))
        self._shown[index] = (done, shown)


def committed_origins(record: StepRecord) -> list[int]:
    """Of each token that a step committed in one row, the bits of the specialists that proposed it, 0 for the last,
    the verifier's own, unless a stop or the limit came before it."""
    accepted = record.path.nodes[1 : record.path.count + 1]
    return [*map(int, record.tree.origin[accepted]), 0][: record.committed]
