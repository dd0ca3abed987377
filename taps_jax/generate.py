"""Answers a prompt, or chats, with speculative decoding.

python -m taps_jax.generate --drafter=runs/smollm2/drafter --prompt="Why is the sky blue?"
python -m taps_jax.generate --drafter=runs/smollm2/drafter --chat
"""

import sys
from collections.abc import Iterator

from absl import flags

from taps_jax import cli, decoder_flags
from taps_jax.checkpoints.verifier import load_verifier
from taps_jax.generation import Generated, generate

_PROMPT = flags.DEFINE_string("prompt", None, "User message; without one, messages come from standard input.")
_CHAT = flags.DEFINE_bool("chat", False, "Every line of standard input is a turn of one conversation.")
_SYSTEM = flags.DEFINE_string("system", None, "System message.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 256, "Most tokens per answer.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Keep the most probable tokens up to this mass.")
_TOP_K_SAMPLING = flags.DEFINE_integer("top_k_sampling", 0, "Keep this many most probable tokens; 0 keeps all.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the random stream.")
_STREAM = flags.DEFINE_bool("stream", True, "Print text as it is decoded.")


def main() -> None:
    tree = decoder_flags.given_tree()
    verifier = load_verifier(decoder_flags.VERIFIER.value)
    drafter = shape = None  # without a drafter, decoding is plain
    if decoder_flags.DRAFTER.value:
        drafter = decoder_flags.given_drafter(verifier)
        shape = decoder_flags.chosen_tree(tree, verifier, drafter, batch_size=1)
    start = [{"role": "system", "content": _SYSTEM.value}] if _SYSTEM.value else []
    history = start
    for message in _messages():
        history = [*(history if _CHAT.value else start), {"role": "user", "content": message}]
        (answer,) = generate(
            verifier,
            [history],
            drafter,
            tree=shape,
            max_new_tokens=_MAX_NEW_TOKENS.value,
            temperature=_TEMPERATURE.value,
            top_p=_TOP_P.value,
            top_k=_TOP_K_SAMPLING.value,
            seed=_SEED.value,
            on_text=_show if _STREAM.value else None,
            warm_up=True,
        )
        print(flush=True) if _STREAM.value else print(answer.text, flush=True)
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


def _summary(answer: Generated) -> str:
    speed = f"{len(answer.tokens)} tokens, {len(answer.tokens) / answer.seconds:.1f} tokens/s"
    length = f", acceptance length {answer.acceptance_length:.2f}" if answer.steps else ""
    return f"[{speed}{length}]"


if __name__ == "__main__":
    cli.run(main)
