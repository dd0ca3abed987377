"""Measures this machine: the parts of a decoding step, plain decoding against transformers, the fastest draft tree; or
a training step against its plain formulation.

    python -m taps_jax.benchmark decode --drafter=runs/smollm2/drafter [--json=FILE]
    python -m taps_jax.benchmark decode --shape=llama3-8b               # random weights: the parts only
    python -m taps_jax.benchmark train [--rows=4 --length=512 --draft_vocabulary=8192]

Every figure is a median in milliseconds with the least and the most. A bound is the least time in which this machine,
by its measured bandwidth and product rate, could read the weights and do the sums.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from taps_jax import cli, decoder_flags
from taps_jax.benchmarks.composing import measure_composing
from taps_jax.benchmarks.decode import Row, measure_decoding
from taps_jax.benchmarks.peers import transformers_tokens_per_second
from taps_jax.benchmarks.shapes import SHAPES, named_shape, random_decoder
from taps_jax.benchmarks.timing import Machine, measure_machine
from taps_jax.benchmarks.train import compiled_memory, estimated_memory, make_batch, measure_training
from taps_jax.benchmarks.tree_choice import TreeChoice, find_tree, sample_texts
from taps_jax.checkpoints.hf_drafter import drafter_config
from taps_jax.checkpoints.verifier import Verifier, default_dtype, load_verifier
from taps_jax.evaluation.tables import format_table
from taps_jax.files import replacing
from taps_jax.loading import plain_decoder, speculative_decoder, tree_shape
from taps_jax.memory import peak_memory_gb
from taps_jax.models.drafter import Drafter
from taps_jax.speculative.decode import Models, Weights
from taps_jax.speculative.engine import Request, engine_factory
from taps_jax.speculative.tree_search import Text
from taps_jax.training.step import Frozen

_SHAPE = flags.DEFINE_string("shape", None, "Random weights of this shape, llama3-8b or smollm2-135m, for a drafter.")
_ROWS = flags.DEFINE_integer("rows", 4, "Of the training batch.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 512, "Tokens of its rows.", lower_bound=3)
_DRAFT_VOCABULARY = flags.DEFINE_integer(
    "draft_vocabulary", 0, "Token ids that training predicts; 0: all.", lower_bound=0
)
_JSON = flags.DEFINE_string("json", None, "File for the figures.")

_PEER_PROMPTS = 3
_PEER_TOKENS = 48
_TREES_SHOWN = 5


def decode() -> None:
    machine = measure_machine(default_dtype())
    print(
        f"{jax.devices()[0].device_kind}, {jax.device_count()} device(s): {machine.bandwidth:.1f} GB/s, "
        f"{default_dtype().__name__} product {machine.product_rate:.0f} GFLOP/s"
    )
    figures = {"machine": machine._asdict()}
    tree = decoder_flags.given_tree()
    if _SHAPE.value:
        decoder = random_decoder(_SHAPE.value, default_dtype(), tree or tree_shape())
        figures["parts"] = _parts(decoder, machine)
        figures["composing"] = _composing(decoder)
    else:
        verifier = load_verifier(decoder_flags.VERIFIER.value)
        drafter = decoder_flags.given_drafting(verifier).drafters[0]
        found = find_tree(verifier, drafter, 1, cli.progress)
        trees = {tree or tree_shape(), found.best.shape}
        decoders = [speculative_decoder(verifier, [drafter], shape) for shape in sorted(trees, key=str)]
        figures["parts"] = _parts(decoders[0], machine)
        figures["composing"] = _composing(decoders[0])
        figures["trees"] = _trees(found)
        figures["tokens_per_second"] = _speeds(verifier, decoders)
    print(f"peak memory of this process: {peak_memory_gb():.2f} GB")
    _write_json(figures)


def train() -> None:
    name = _SHAPE.value or "smollm2-135m"
    drafter = Drafter(drafter_config(named_shape(name)))
    width, vocabulary = drafter.config.layer.hidden_size, _DRAFT_VOCABULARY.value or drafter.config.layer.vocab_size
    rows, length, dtype = _ROWS.value, _LENGTH.value, default_dtype()
    rng = np.random.default_rng(0)
    embedding, head = (
        jnp.asarray(rng.normal(size=(size, width)) / np.sqrt(width), dtype)
        for size in (drafter.config.layer.vocab_size, vocabulary)
    )
    batch = make_batch(rng, rows, length, width, drafter.config.layer.vocab_size, dtype)
    costs = measure_training(drafter, Frozen(embedding, head), batch, dtype)
    ours, plain = costs
    print(
        f"{name}, {rows} rows of {length // 2} to {length} tokens, {ours.tokens} of them supervised, {vocabulary:,} "
        f"token ids, {dtype.__name__}, random weights"
    )
    table = [
        (
            cost.name,
            str(cost.timing),
            f"{cost.tokens_per_second:.0f}",
            f"{cost.temporary / 1e9:.2f}",
            f"{cost.loss:.4f}",
        )
        for cost in costs
    ]
    print(format_table(("training step", "ms", "tokens/s", "temporary memory, GB", "loss"), table))
    print(
        f"taps_jax / plain: {ours.tokens_per_second / plain.tokens_per_second:.2f}x the tokens/s, "
        f"{ours.temporary / plain.temporary:.2f}x the temporary memory"
    )
    figures = [{**cost._asdict(), "timing": cost.timing._asdict()} for cost in costs]
    _write_json({"train": figures, "llama3-8b": _large_training()})


def _large_training() -> dict[str, int]:
    """Prints what a step of the paper's size needs on each device, which this machine need not be able to run."""
    rows, length = 8, 1024
    drafter = Drafter(drafter_config(SHAPES["llama3-8b"]))
    vocabulary = drafter.config.layer.vocab_size
    parts = estimated_memory(drafter, vocabulary, rows, length)
    found = compiled_memory(drafter, vocabulary, rows, length, jnp.bfloat16)
    print(f"\nllama3-8b, {rows} rows of {length} tokens a device, {vocabulary:,} token ids, bfloat16, not run")
    table = [(name, f"{size / 1e9:.2f}") for name, size in parts.items()]
    table.append(("together", f"{sum(parts.values()) / 1e9:.2f}"))
    table.append((f"{jax.default_backend()} compiler, for comparison", f"{found / 1e9:.2f}"))
    print(format_table(("temporary memory by arithmetic", "GB"), table))
    return {**parts, "compiler": found}


def _write_json(figures: dict) -> None:
    if _JSON.value:
        with replacing(Path(_JSON.value)) as temporary:
            temporary.write_text(json.dumps(figures, indent=1) + "\n")


def _parts(decoder: tuple[Models, Weights], machine: Machine) -> list[dict]:
    """Prints the table of a step's parts."""
    rows = list(cli.progress(measure_decoding(*decoder, machine), "measuring parts"))
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
    by_name = {row.name: row.timing.median for row in rows}
    shape = decoder[0].shape
    ids = decoder[1].drafter.head.shape[0]
    forwards = [f"verify {shape.num_nodes} nodes", "draft: extend", f"draft: grow {shape}, own head of {ids} ids"]
    whole = by_name[f"whole step, tree {shape}"]
    print(f"whole step / its verify and draft forwards: {whole / sum(by_name[name] for name in forwards):.2f}x")
    return [_plain_dict(row) for row in rows]


def _composing(decoder: tuple[Models, Weights]) -> list[dict]:
    """Prints what drafting with several specialists costs, beside one."""
    rows = list(cli.progress(measure_composing(*decoder), "measuring composition"))
    alone = {row.head: row.timing.median for row in rows if row.specialists == 1}
    table = [
        (
            f"{row.composition}, {row.head}",
            str(row.specialists),
            str(row.timing),
            f"{row.timing.median / alone[row.head]:.2f}x",
        )
        for row in rows
    ]
    print(format_table(("drafting", "specialists", "ms", "of one"), table))
    return [{**row._asdict(), "timing": row.timing._asdict()} for row in rows]


def _trees(found: TreeChoice) -> list[dict]:
    """Prints the best trees by measured times and the drafter's acceptance on sample answers."""
    shown = found.choices[:_TREES_SHOWN]
    table = [
        (
            str(choice.shape),
            f"{choice.acceptance_length:.2f}",
            f"{choice.step_ms:.1f}",
            f"{choice.step_ms / found.plain_ms:.2f}",
            f"{choice.tokens_per_second:.1f}",
        )
        for choice in shown
    ]
    print(format_table(("tree", "acceptance length", "step, ms", "needed to beat plain", "tokens/s"), table))
    print(f"fastest: {found}")
    return [{**choice._asdict(), "shape": str(choice.shape)} for choice in shown]


def _speeds(verifier: Verifier, decoders: list[tuple[Models, Weights]]) -> dict[str, float]:
    """Prints tokens/s of real decoding on the same prompts, and of transformers when torch is installed."""
    texts = sample_texts(verifier)
    speeds = {"plain": _tokens_per_second(plain_decoder(verifier), texts)}
    for decoder in decoders:
        speeds[f"speculative, tree {decoder[0].shape}"] = _tokens_per_second(decoder, texts)
    prompts = [text.prompt for text in texts[:_PEER_PROMPTS]]
    try:
        speeds["transformers, plain"] = transformers_tokens_per_second(verifier, prompts, _PEER_TOKENS)
    except ImportError:
        print("torch is not installed, so there is no comparison with transformers")
    for name, speed in speeds.items():
        print(f"greedy decoding, {name}: {speed:.1f} tokens/s, {speed / speeds['plain']:.2f}x plain")
    if "transformers, plain" in speeds:
        print(f"plain / transformers: {speeds['plain'] / speeds['transformers, plain']:.2f}x")
    return speeds


def _tokens_per_second(decoder: tuple[Models, Weights], texts: list[Text]) -> float:
    make_engine = engine_factory(*decoder, (), batch_size=1, max_new_tokens=_PEER_TOKENS)
    engine = make_engine(max(len(text.prompt) for text in texts))
    engine.warm_up(len(text.prompt) for text in texts)
    done = engine.decode(Request(text.prompt, _PEER_TOKENS) for text in texts)
    return sum(len(answer.tokens) for answer in done) / engine.seconds


def _plain_dict(row: Row) -> dict:
    return {**row._asdict(), "timing": row.timing._asdict()}


if __name__ == "__main__":
    cli.run({"decode": decode, "train": train})
