"""The draft tree that is fastest on this machine: measured step times weighed against a trace of acceptance."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from taps_jax.assets import ASSETS
from taps_jax.benchmarks.parts import Parts
from taps_jax.checkpoints.hf_drafter import LoadedDrafter
from taps_jax.checkpoints.verifier import Verifier
from taps_jax.data.questions import read_questions
from taps_jax.data.tokenize import encode_prompt
from taps_jax.files import cache_folder, replacing
from taps_jax.loading import plain_decoder, speculative_decoder, tree_shape
from taps_jax.speculative.decode import Models, Weights
from taps_jax.speculative.engine import Request, engine_factory
from taps_jax.speculative.tree import TreeShape
from taps_jax.speculative.tree_search import Choice, Text, rank_shapes, trace_texts

_NODES = (1, 2, 4, 8, 16, 32, 60)
_TOTAL_TOKENS = (2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 60)
_DEPTHS = range(8)
_TOP_KS = (1, 2, 3, 4, 6, 8, 10)
_QUESTION_FILES = ("math_heldout", "chat_heldout")
_QUESTIONS, _ANSWER_TOKENS = 4, 48
_REPEATS = 7
Progress = Callable[[Iterable, str, int], Iterable]


class StepCosts(NamedTuple):
    """Milliseconds of the parts of a step.

    Attributes:
      plain: a plain step.
      verify: by number of nodes.
      first: growing one level, by top_k.
      level: each further level, by top_k.
      rest: what a whole step takes beyond verifying and growing.
    """

    plain: float
    verify: dict[int, float]
    first: dict[int, float]
    level: dict[int, float]
    rest: float

    def step_ms(self, shape: TreeShape) -> float:
        """A step with a tree of some size; between measured node counts the line that joins them."""
        verify = float(np.interp(shape.num_nodes, list(self.verify), list(self.verify.values())))
        return verify + self.first[shape.top_k] + shape.depth * self.level[shape.top_k] + self.rest


class TreeChoice(NamedTuple):
    """The best sizes, best first, beside plain decoding."""

    choices: list[Choice]
    plain_ms: float

    @property
    def best(self) -> Choice:
        return self.choices[0]

    def __str__(self) -> str:
        best = self.best
        needed = best.step_ms / self.plain_ms
        verdict = "faster" if best.acceptance_length > needed else "slower"
        return (
            f"tree {best.shape}: {best.acceptance_length:.2f} tokens a step of {best.step_ms:.1f} ms; plain decoding "
            f"takes {self.plain_ms:.1f} ms a token, so from {needed:.2f} on speculation is faster, and here it is "
            f"{best.acceptance_length / needed:.2f}x its speed, {verdict}"
        )


def find_tree(verifier: Verifier, drafter: LoadedDrafter, batch_size: int, progress: Progress) -> TreeChoice:
    """Measures this machine and drafts along answers to the questions that come with the package.

    Args:
      verifier, drafter: what will decode.
      batch_size: rows decoded at once.
      progress: wraps an iterable of measurements, given (iterable, title, total).
    """
    models, weights = speculative_decoder(verifier, [drafter], tree_shape())
    costs = measure_costs(models, weights, batch_size, progress)
    widest = max(size for size in _TOP_KS if size <= weights.drafter.head.shape[0])
    trace = trace_texts(models, weights, sample_texts(verifier), max(_DEPTHS), widest)
    return TreeChoice(rank_shapes(trace, list(_sizes(widest)), costs.step_ms), costs.plain)


def cached_tree(verifier: Verifier, drafter: LoadedDrafter, batch_size: int, progress: Progress) -> TreeChoice:
    """As `find_tree`, remembered per device, verifier, drafter and batch size in the user's cache folder."""
    path = cache_folder() / "trees.json"
    try:
        known = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):  # a damaged cache is measured anew
        known = {}
    key = _key(verifier, drafter, batch_size)
    if key not in known:
        found = find_tree(verifier, drafter, batch_size, progress)
        shape, length, step_ms = found.best
        known[key] = {
            "tree": str(shape),
            "acceptance_length": length,
            "step_ms": step_ms,
            "plain_ms": found.plain_ms,
        }
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(known, indent=1) + "\n")
    row = known[key]
    shape = TreeShape(*map(int, row["tree"].split("/")))
    return TreeChoice([Choice(shape, row["acceptance_length"], row["step_ms"])], row["plain_ms"])


def measure_costs(models: Models, weights: Weights, batch_size: int, progress: Progress) -> StepCosts:
    """Times the parts that make up a step of any tree size."""
    parts, shape = Parts(models, weights, batch_size, _REPEATS), models.shape
    deep = 3
    sizes = [TreeShape(60, depth, top_k) for top_k in _TOP_KS for depth in (0, deep)]
    jobs: dict[object, Callable[[], object]] = {
        "plain": parts.plain_step,
        "whole": parts.whole_step,
        **{nodes: lambda nodes=nodes: parts.verify(nodes) for nodes in _NODES},
        **{size: lambda size=size: parts.grow(size) for size in sizes if size.top_k <= weights.drafter.head.shape[0]},
    }
    # The least of several: what else the machine does must not choose the tree.
    found = {name: jobs[name]().least for name in progress(jobs, "measuring this machine", len(jobs))}
    first = {size.top_k: found[size] for size in sizes if size in found and size.depth == 0}
    last = {size.top_k: found[size] for size in sizes if size in found and size.depth == deep}
    level = {top_k: max(0.0, last[top_k] - first[top_k]) / deep for top_k in first}
    verify = dict(zip(_NODES, np.maximum.accumulate([found[nodes] for nodes in _NODES]).tolist(), strict=True))
    costs = StepCosts(found["plain"], verify, first, level, 0.0)
    return costs._replace(rest=max(0.0, found["whole"] - costs.step_ms(shape)))


def sample_texts(verifier: Verifier) -> list[Text]:
    """The verifier's greedy answers to a few questions that come with the package."""
    files = [read_questions(ASSETS / "questions" / f"{name}.jsonl")[:_QUESTIONS] for name in _QUESTION_FILES]
    turns = [question.turns[0] for questions in files for question in questions]
    prompts = [encode_prompt(verifier.tokenizer, [{"role": "user", "content": turn}]) for turn in turns]
    make_engine = engine_factory(
        *plain_decoder(verifier), verifier.stop_tokens, batch_size=len(prompts), max_new_tokens=_ANSWER_TOKENS
    )
    engine = make_engine(max(map(len, prompts)))
    done = engine.decode(Request(prompt, _ANSWER_TOKENS) for prompt in prompts)
    return [Text(prompts[answer.index], answer.tokens) for answer in done if len(answer.tokens) > 1]


def _sizes(widest: int) -> Iterator[TreeShape]:
    for top_k in _TOP_KS:
        for depth in _DEPTHS:
            for total_token in _TOTAL_TOKENS:
                shape = TreeShape(total_token, depth, top_k)
                # A tree cannot be deeper than it has nodes, and no wider than its candidates.
                if top_k <= widest and shape.num_nodes == total_token and depth + 2 <= total_token:
                    yield shape


def _key(verifier: Verifier, drafter: LoadedDrafter, batch_size: int) -> str:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves((drafter.params, drafter.vocabulary)):
        digest.update(np.asarray(leaf).tobytes())
    device = jax.devices()[0]
    cores = f" {os.cpu_count()} cores" if device.platform == "cpu" else ""
    models = f"verifier {verifier.fingerprint}, drafter {digest.hexdigest()[:16]}"
    return f"{device.device_kind}{cores}, {models}, {batch_size} at once"
