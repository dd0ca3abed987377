"""Answering prompts from Python: what `taps_jax.generate` offers."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from taps_jax.checkpoints.hf_drafter import LoadedDrafter
from taps_jax.checkpoints.verifier import Verifier
from taps_jax.data.tokenize import encode_prompt
from taps_jax.errors import InputError
from taps_jax.loading import DEFAULT_COMPOSITION, check_together, plain_decoder, speculative_decoder, tree_shape
from taps_jax.speculative.composition import Composition
from taps_jax.speculative.decode import Models, Weights
from taps_jax.speculative.engine import Request, engine_factory
from taps_jax.speculative.tree import TreeShape
from taps_jax.streaming import OriginStream, TextStream

Prompt = str | Sequence[dict[str, str]]


class Generated(NamedTuple):
    """The answer to one prompt.

    Attributes:
      text: without special tokens.
      tokens: generated ids, the stop token included.
      steps: verification steps taken.
      seconds: from reading the prompt to the last token.
    """

    text: str
    tokens: tuple[int, ...]
    steps: int
    seconds: float

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per verification step; not a number if none was taken."""
        return (len(self.tokens) - 1) / self.steps if self.steps else float("nan")


def generate(
    verifier: Verifier,
    prompts: Sequence[Prompt],
    drafter: LoadedDrafter | Sequence[LoadedDrafter] | None = None,
    *,
    compose: str = DEFAULT_COMPOSITION,
    tree: TreeShape | None = None,
    max_new_tokens: int = 256,
    temperature: float | Sequence[float] = 0.0,
    top_p: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    seed: int = 0,
    batch_size: int = 1,
    on_text: Callable[[int, str], None] | None = None,
    on_origin: Callable[[int, str, tuple[str, ...]], None] | None = None,
    warm_up: bool = False,
) -> list[Generated]:
    """Answers prompts of any lengths. The drafter changes the speed, never the answers or their distribution.

    Args:
      verifier: from `load_verifier`.
      prompts: user messages, or conversations as lists of {"role", "content"}.
      drafter: from `load_drafter`, several of those, or None for plain decoding.
      compose: how several drafters share a step, a value of `Composition`.
      tree: size of the draft tree; the platform's default if None.
      max_new_tokens: most tokens per answer.
      temperature: 0 is greedy; one for all prompts, or one each; as are
      top_p: keep the most probable tokens up to this mass, and
      top_k: keep this many most probable tokens, 0 for all.
      seed: with a prompt's place in the list it fixes the answer's random stream, whatever the tree or batch.
      batch_size: prompts decoded at once.
      on_text: called with a prompt's index and each new piece of its answer as it is decoded.
      on_origin: as `on_text`, called for each token with its text and the names of the drafters that proposed it, none
        for a token of the verifier's own.
      warm_up: compile first, so that `seconds` is decoding alone; costs one more reading of a prompt per bucket.
    Returns:
      Answers in the order of the prompts.
    Raises:
      InputError: a setting is out of range, a prompt does not fit the verifier's positions, or the drafters do not fit
        together.
    """
    if not prompts:
        return []
    settings = _settings(len(prompts), temperature=temperature, top_p=top_p, top_k=top_k)
    requests = [
        Request(_encode(verifier, prompt), max_new_tokens, **chosen, seed=(seed, index))
        for index, (prompt, chosen) in enumerate(zip(prompts, settings, strict=True))
    ]
    drafters = () if drafter is None else (drafter,) if isinstance(drafter, LoadedDrafter) else tuple(drafter)
    decoder = _decoder(verifier, drafters, compose, tree)
    make_engine = engine_factory(
        *decoder, verifier.stop_tokens, batch_size=min(batch_size, len(prompts)), max_new_tokens=max_new_tokens
    )
    engine = make_engine(max(len(request.tokens) for request in requests))
    if warm_up:
        engine.warm_up(len(request.tokens) for request in requests)
    stream = TextStream(verifier, on_text) if on_text else None
    origins = None
    if on_origin:
        stream = origins = OriginStream(verifier, on_origin, [drafter.name for drafter in drafters])
    answers: dict[int, Generated] = {}
    for done in engine.decode(requests, on_tokens=stream, on_step=origins and origins.note):
        text = verifier.tokenizer.decode(done.tokens, skip_special_tokens=True)
        answers[done.index] = Generated(text, done.tokens, done.steps, done.seconds)
    return [answers[index] for index in range(len(prompts))]


def _decoder(
    verifier: Verifier, drafters: tuple[LoadedDrafter, ...], compose: str, tree: TreeShape | None
) -> tuple[Models, Weights]:
    if not drafters:
        return plain_decoder(verifier)
    if compose not in list(Composition):
        raise InputError(f"compose is {compose!r}, expected one of {', '.join(Composition)}")
    check_together(drafters)
    composition = Composition(compose) if len(drafters) > 1 else Composition.SINGLE
    return speculative_decoder(verifier, drafters, tree or tree_shape(), composition)


def _encode(verifier: Verifier, prompt: Prompt) -> tuple[int, ...]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return encode_prompt(verifier.tokenizer, messages)


_RANGES = {
    "temperature": (lambda value: value >= 0, "at least 0"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "top_k": (lambda value: value >= 0 and int(value) == value, "a whole number of at least 0"),
}


def _settings(count: int, **given: float | Sequence[float]) -> Iterable[dict[str, float]]:
    """One dict of sampling settings per prompt."""
    columns = {}
    for name, value in given.items():
        values = [value] * count if isinstance(value, int | float) else list(value)
        if len(values) != count:
            raise InputError(f"{name} has {len(values)} values for {count} prompts")
        accepts, expected = _RANGES[name]
        for one in values:
            if not accepts(one):
                raise InputError(f"{name} is {one}, expected {expected}")
        columns[name] = values
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
