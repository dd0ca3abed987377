"""Answers a prompt, or chats, with speculative decoding.

python -m taps_jax.generate --prompt="Why is the sky blue?"
python -m taps_jax.generate --drafter=runs/smollm2/drafter --chat
python -m taps_jax.generate --drafter=math=DIR --drafter=chat=DIR --compose=merge:trie --show_origin --chat
"""

import functools
import itertools
import sys
from collections.abc import Iterator

from absl import flags

from taps_jax import cli, decoder_flags
from taps_jax.checkpoints.verifier import load_verifier
from taps_jax.generation import Generated, generate
from taps_jax.loading import DEFAULT_COMPOSITION

_PROMPT = flags.DEFINE_string("prompt", None, "User message; without one, messages come from standard input.")
_CHAT = flags.DEFINE_bool("chat", False, "Every line of standard input is a turn of one conversation.")
_SYSTEM = flags.DEFINE_string("system", None, "System message.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 256, "Most tokens per answer.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Keep the most probable tokens up to this mass.")
_TOP_K_SAMPLING = flags.DEFINE_integer("top_k_sampling", 0, "Keep this many most probable tokens; 0 keeps all.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the random stream.")
_SHOW_ORIGIN = flags.DEFINE_bool(
    "show_origin", False, "Colour each token by the drafter that proposed it; the verifier's own are plain."
)
_PLAIN = flags.DEFINE_bool("plain", False, "Decode without a drafter.")
_STREAM = flags.DEFINE_bool("stream", True, "Print text as it is decoded.")

# Light backgrounds of the 256-colour palette, far apart in hue and lightness.
_COLOURS = (117, 216, 157, 222, 183, 225, 152, 187)
_SEVERAL = 250


def main() -> None:
    tree = decoder_flags.given_tree()
    verifier = load_verifier(decoder_flags.VERIFIER.value)
    drafters, composition, shape = (), DEFAULT_COMPOSITION, None
    if not _PLAIN.value:
        drafting = decoder_flags.given_drafting(verifier)
        drafters, composition = drafting
        shape = decoder_flags.chosen_tree(tree, verifier, drafting, batch_size=1)
    if _SHOW_ORIGIN.value:
        colours = dict(zip((drafter.name for drafter in drafters), itertools.cycle(_COLOURS), strict=False))
        legend = [*(_paint(f" {name} ", colour) for name, colour in colours.items()), _paint(" several ", _SEVERAL)]
        print(*legend, file=sys.stderr)
        output = {"on_origin": functools.partial(_show_painted, colours)}
    else:
        output = {"on_text": _show if _STREAM.value else None}
    start = [{"role": "system", "content": _SYSTEM.value}] if _SYSTEM.value else []
    history = start
    for message in _messages():
        history = [*(history if _CHAT.value else start), {"role": "user", "content": message}]
        (answer,) = generate(
            verifier,
            [history],
            drafters,
            compose=composition,
            tree=shape,
            max_new_tokens=_MAX_NEW_TOKENS.value,
            temperature=_TEMPERATURE.value,
            top_p=_TOP_P.value,
            top_k=_TOP_K_SAMPLING.value,
            seed=_SEED.value,
            warm_up=True,
            **output,
        )
        print(flush=True) if any(output.values()) else print(answer.text, flush=True)
        print(_summary(answer), file=sys.stderr)
        history = [*history, {"role": "assistant", "content": answer.text.strip()}]


def _messages() -> Iterator[str]:
    """The prompt, or the lines of standard input that are not blank, with a sign to type at a terminal."""
    if _PROMPT.value is not None:
        yield _PROMPT.value
        return
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _show(_: int, piece: str) -> None:
    print(piece, end="", flush=True)


def _show_painted(colours: dict[str, int], _: int, piece: str, names: tuple[str, ...]) -> None:
    if not names:
        print(piece, end="", flush=True)
        return
    print(_paint(piece, _SEVERAL if len(names) > 1 else colours[names[0]]), end="", flush=True)


def _paint(text: str, colour: int) -> str:
    """Text on a background of the terminal's palette, line by line so that no colour runs to the margin."""
    return "\n".join(f"\033[30;48;5;{colour}m{line}\033[0m" if line else "" for line in text.split("\n"))


def _summary(answer: Generated) -> str:
    speed = f"{len(answer.tokens)} tokens, {len(answer.tokens) / answer.seconds:.1f} tokens/s"
    length = f", acceptance length {answer.acceptance_length:.2f}" if answer.steps else ""
    return f"[{speed}{length}]"


if __name__ == "__main__":
    cli.run(main)
