"""Measures the parts of a decoding step on this machine, and plain decoding against transformers when torch is there.

    python -m taps_jax.benchmark --drafter=runs/smollm2/drafter [--json=FILE]

Every figure is a median in milliseconds with the least and the most. A bound is the least time in which this machine,
by its measured copy bandwidth and float32 product rate, could read the weights and do the sums.
"""

import json
from pathlib import Path

import jax
from absl import flags

from taps_jax import cli
from taps_jax.benchmarks.decode import measure_decoding
from taps_jax.benchmarks.peers import transformers_tokens_per_second
from taps_jax.benchmarks.timing import measure_machine, peak_memory_gb
from taps_jax.checkpoints.verifier import load_verifier
from taps_jax.data.tokenize import encode_prompt
from taps_jax.evaluation.tables import format_table
from taps_jax.files import replacing
from taps_jax.loading import load_drafter, plain_decoder, speculative_decoder, tree_shape
from taps_jax.speculative.engine import Request, engine_factory

_VERIFIER = flags.DEFINE_string("verifier", "smollm2", "smollm2, a GGUF file, a directory or a hub id.")
_DRAFTER = flags.DEFINE_string("drafter", None, "Drafter directory.", required=True)
_TOTAL_TOKEN = flags.DEFINE_integer("total_token", None, "Nodes of the draft tree, root included.")
_DEPTH = flags.DEFINE_integer("depth", None, "Expansions after the first drafted level.")
_TOP_K = flags.DEFINE_integer("top_k", None, "Tokens proposed per expanded node, nodes expanded per level.")
_JSON = flags.DEFINE_string("json", None, "File for the figures.")

_PEER_TOKENS = 48
_PEER_PROMPTS = (
    "Explain why the sky is blue.",
    "A box holds 12 eggs. How many eggs are in 7 boxes?",
    "Write a short poem about rain.",
)


def main() -> None:
    verifier = load_verifier(_VERIFIER.value)
    drafter = load_drafter(_DRAFTER.value, verifier)
    decoder = speculative_decoder(verifier, drafter, tree_shape(_TOTAL_TOKEN.value, _DEPTH.value, _TOP_K.value))
    machine = measure_machine()
    print(
        f"{jax.devices()[0].device_kind}, {jax.device_count()} device(s): copy {machine.bandwidth:.1f} GB/s, "
        f"float32 product {machine.product_rate:.0f} GFLOP/s"
    )
    rows = list(cli.progress(measure_decoding(*decoder, machine), "measuring"))
    plain = rows[0].timing.median
    table = [
        (
            row.name,
            str(row.timing),
            f"{row.timing.median / plain:.2f}x",
            "-" if row.bound is None else f"{row.bound:.1f}",
            "-" if row.bound is None else f"{row.bound / row.timing.median:.0%}",
        )
        for row in rows
    ]
    print(format_table(("part", "ms", "of a plain step", "bound, ms", "reached"), table))
    peers = _plain_speeds(verifier)
    for name, speed in peers.items():
        print(f"plain greedy decoding, {name}: {speed:.1f} tokens/s")
    if len(peers) == 2:
        ours, theirs = peers.values()
        print(f"taps_jax / transformers: {ours / theirs:.2f}x")
    print(f"peak memory of this process: {peak_memory_gb():.2f} GB")
    if _JSON.value:
        figures = {"machine": machine._asdict(), "rows": [_plain_dict(row) for row in rows], "tokens_per_second": peers}
        with replacing(Path(_JSON.value)) as temporary:
            temporary.write_text(json.dumps(figures, indent=1) + "\n")


def _plain_speeds(verifier) -> dict[str, float]:
    """Tokens/s of both libraries on the same prompts; of this one alone without torch."""
    prompts = [encode_prompt(verifier.tokenizer, [{"role": "user", "content": text}]) for text in _PEER_PROMPTS]
    make_engine = engine_factory(*plain_decoder(verifier), (), batch_size=1, max_new_tokens=_PEER_TOKENS)
    engine = make_engine(max(map(len, prompts)))
    engine.warm_up(map(len, prompts))
    tokens = sum(len(done.tokens) for done in engine.decode(Request(prompt, _PEER_TOKENS) for prompt in prompts))
    speeds = {"taps_jax": tokens / engine.seconds}
    try:
        speeds["transformers"] = transformers_tokens_per_second(verifier, prompts, _PEER_TOKENS)
    except ImportError:
        print("torch is not installed, so there is no comparison with transformers")
    return speeds


def _plain_dict(row) -> dict:
    return {**row._asdict(), "timing": row.timing._asdict()}


if __name__ == "__main__":
    cli.run(main)
