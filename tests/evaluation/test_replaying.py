"""Replaying answers gives the steps that decoding them takes, for every composition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taps_jax.evaluation.replaying import Row, replay_answer
from taps_jax.evaluation.trace import TracedAnswer, from_table, steps_from_records, to_table
from taps_jax.speculative.composition import Composition
from taps_jax.speculative.engine import Engine, Request
from taps_jax.speculative.tree import TreeShape
from tests.tiny import make_decoder

PROMPTS = [(5, 9, 2), tuple(range(1, 31)), (3,)]
NEW_TOKENS = 20
STOP = (7, 11)
ROWS = {rule.value: Row((0, 2), rule) for rule in Composition if rule is not Composition.SINGLE}
ROWS["alone"] = Row((1,), Composition.SINGLE)


@pytest.fixture(scope="module")
def decoder():
    """Three specialists, one of which cannot propose every token."""
    models, weights = make_decoder(TreeShape(12, 2, 4), specialists=3, sharpness=8.0)
    own = np.ones((3, 48), bool)
    own[2, 30:] = False
    drafter = weights.drafter
    return models, weights._replace(drafter=drafter._replace(own=own, embedding=drafter.embedding * 5))


@pytest.fixture(scope="module", params=[0.0, 1.0])
def decoded(request, decoder):
    """Per row of the table the answers with the steps that decoding took, at a temperature."""
    models, weights = decoder
    found = {}
    for name, row in ROWS.items():
        members = np.array(row.members)
        drafter = weights.drafter
        params = jax.tree.map(lambda leaf, members=members: leaf[members], drafter.params)
        alone = weights._replace(drafter=drafter._replace(params=params, own=jnp.asarray(drafter.own[members])))
        engine = Engine(
            models._replace(composition=row.composition), alone, STOP, cache_size=64, max_new_tokens=NEW_TOKENS
        )
        records: list[list] = [[] for _ in PROMPTS]
        requests = [Request(prompt, NEW_TOKENS, temperature=request.param) for prompt in PROMPTS]
        done = engine.decode(requests, on_step=lambda index, record, into=records: into[index].append(record))
        answers = {answer.index: answer.tokens for answer in done}
        found[name] = [(answers[index], steps_from_records(records[index])) for index in range(len(PROMPTS))]
    return found


def test_all_rows_write_the_same_text(decoded):
    texts = {tuple(tokens for tokens, _ in answers) for answers in decoded.values()}
    assert len(texts) == 1


def test_replay_takes_the_steps_of_decoding(decoder, decoded):
    models, weights = decoder
    accepted = 0
    for index, prompt in enumerate(PROMPTS):
        answer = decoded["alone"][index][0]
        replayed = replay_answer(models, weights, ROWS, prompt, answer)
        for name, steps in replayed.items():
            real = decoded[name][index][1]
            for field in ("position", "committed", "chosen", "token", "parent", "origin", "accepted"):
                np.testing.assert_array_equal(getattr(steps, field), getattr(real, field), f"{name} {field}")
            for field in ("log_prob", "entropy"):
                np.testing.assert_allclose(getattr(steps, field), getattr(real, field), atol=1e-3, err_msg=name)
            if name in ("route:confidence", "route:entropy-step", "route:likelihood"):
                np.testing.assert_allclose(steps.score, real.score, atol=1e-3, err_msg=name)
            assert steps.committed.sum() == len(answer) - 1
            accepted += steps.accepted.sum()
    assert accepted > 10  # random drafters, but the comparison is of something


def test_traces_survive_a_table(decoded):
    answers = [TracedAnswer(f"q{index}", index, *answer) for index, answer in enumerate(decoded["merge:trie"])]
    found = dict(from_table(to_table([*answers, TracedAnswer("short", 0, (1,), None)])))
    assert list(found) == [("q0", 0), ("q1", 1), ("q2", 2)]
    for answer in answers:
        for name, values in answer.steps._asdict().items():
            again = getattr(found[answer.question_id, answer.turn], name)
            np.testing.assert_array_equal(again, values)
            assert again.dtype == values.dtype


def test_an_answer_of_one_token_has_no_steps(decoder):
    assert replay_answer(*decoder, ROWS, (1, 2), (7,)) == dict.fromkeys(ROWS)


def test_depths_and_bonus_tokens_of_steps(decoded):
    for _, steps in decoded["route:confidence"]:
        depth = steps.depth
        for step in range(len(depth)):
            for node in range(1, depth.shape[1]):
                walk, at = 0, node
                while at and steps.parent[step, at] != at:
                    at, walk = steps.parent[step, at], walk + 1
                assert depth[step, node] == walk
        assert (steps.bonus == (steps.committed == steps.accepted.sum(axis=1) + 1)).all()
