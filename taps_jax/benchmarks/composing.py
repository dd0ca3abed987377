"""What drafting costs with several specialists, and what sharing a step among them adds."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from taps_jax.benchmarks.parts import started
from taps_jax.benchmarks.timing import Timing, time_call
from taps_jax.models.llama import head_table
from taps_jax.speculative.composition import Composition, draft
from taps_jax.speculative.decode import Models, Weights
from taps_jax.speculative.drafting import DrafterWeights

SPECIALISTS = (1, 2, 3, 4)
DRAFT_VOCABULARY = 8192
_REPEATS = 15


class ComposingRow(NamedTuple):
    """Time to draft one row's tree: extending, growing and composing."""

    head: str
    composition: Composition
    specialists: int
    timing: Timing


def measure_composing(models: Models, weights: Weights) -> Iterator[ComposingRow]:
    """Times drafting by copies of one drafter: with 1 to 4 for two heads, and by every rule for two of them.

    Args:
      models, weights: a speculative decoder with one drafter.
    """
    full = head_table(weights.verifier)
    heads = {"full head": weights.drafter._replace(head=full, vocabulary=None)}
    if full.shape[0] > DRAFT_VOCABULARY:
        ids = jnp.arange(DRAFT_VOCABULARY, dtype=jnp.int32)
        heads[f"{DRAFT_VOCABULARY} ids"] = weights.drafter._replace(head=jnp.array(full[ids]), vocabulary=ids)
    for name, drafting in heads.items():
        yield ComposingRow(name, Composition.SINGLE, 1, _draft(models, weights, drafting, Composition.SINGLE, 1))
        for specialists in SPECIALISTS[1:]:
            timing = _draft(models, weights, drafting, Composition.MERGE_TRIE, specialists)
            yield ComposingRow(name, Composition.MERGE_TRIE, specialists, timing)
    for rule in (Composition.MERGE_CONCAT, *(rule for rule in Composition if rule.routes)):
        yield ComposingRow(name, rule, 2, _draft(models, weights, drafting, rule, 2))


def _draft(models: Models, weights: Weights, drafting: DrafterWeights, rule: Composition, specialists: int) -> Timing:
    copies = jax.tree.map(lambda leaf: jnp.repeat(leaf, specialists, axis=0), drafting.params)
    drafting = drafting._replace(params=copies)
    state = started(models._replace(composition=rule), weights._replace(drafter=drafting), batch=1)
    # As after the turn's first step: the rule that probes then goes on with the specialist it chose.
    routing = state.routing._replace(chosen=jnp.zeros_like(state.routing.chosen))
    once = jax.jit(functools.partial(draft, rule, models.drafter, shape=models.shape))
    return time_call(
        lambda: once(drafting, state.drafter_cache, state.length, state.pairs, routing, state.root), _REPEATS
    )
