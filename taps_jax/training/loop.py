"""Training a drafter from a configuration: data, features, steps, metrics, checkpoints, export."""

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from taps_jax import cli
from taps_jax.checkpoints.hf_drafter import cast_params, check_fits, drafter_config, read_drafter, write_drafter
from taps_jax.checkpoints.verifier import Verifier, default_dtype, load_verifier
from taps_jax.data.batches import Example, batch_rows, digest, pad_rows
from taps_jax.data.examples import Dataset, load_examples, write_account
from taps_jax.data.vocabulary import frequent_tokens, uncovered_share
from taps_jax.errors import InputError
from taps_jax.files import replacing
from taps_jax.models.config import DrafterConfig
from taps_jax.models.drafter import Drafter, init_drafter
from taps_jax.models.llama import embedding_table, head_table
from taps_jax.sharding import make_mesh, replicated, rows_over_data
from taps_jax.training.checkpoint import Checkpoints
from taps_jax.training.features import FeatureSource, OnlineFeatures, cache_features
from taps_jax.training.guard import Step, TerminationRequest, check_finite
from taps_jax.training.metrics import MetricsLog
from taps_jax.training.objective import LossWeights
from taps_jax.training.step import Batch, Frozen, init_state, make_optimizer, make_train_step

_ROW_STEP = 32  # the row length of a run is the longest row's, rounded up to a multiple


class Start(NamedTuple):
    """What a run starts from: the drafter's shape, its first parameters and its draft vocabulary."""

    config: DrafterConfig
    params: dict
    vocabulary: np.ndarray | None


def train(config: ConfigDict, workdir: Path) -> Path:
    """Trains the drafter that `config` describes, going on from the newest checkpoint in `workdir`.

    Args:
      config: as made by `base_config`.
      workdir: gets `checkpoints/`, `features/`, `metrics.jsonl`, `config.json` and, at the end, `drafter/`.
    Returns:
      The exported drafter's directory.
    Raises:
      InputError: a setting or file is bad, or the workdir belongs to another run.
    """
    mesh = make_mesh(config.mesh.data, config.mesh.tensor)
    verifier = load_verifier(config.verifier, mesh=mesh)
    dataset = _load(config, config.data.conversations, verifier)
    examples = dataset.examples
    print(f"conversations: {len(examples):,} to train on\n{dataset.account()}")
    start = _start(config, verifier, examples)
    optimizer, schedule = make_optimizer(**config.optimizer)
    objective = config.objective
    if config.data.batch_size % (config.data.accumulate * mesh.shape["data"]):
        raise InputError(
            f"data.batch_size {config.data.batch_size} must be a multiple of data.accumulate "
            f"{config.data.accumulate} times the {mesh.shape['data']} devices of the data axis"
        )
    train_step = make_train_step(
        Drafter(start.config),
        optimizer,
        weights=LossWeights(objective.feature_weight, objective.soft_weight, objective.topk_weight, objective.topk),
        passes=objective.passes,
        noise=objective.noise,
        zero_logit_mask=objective.zero_logit_mask,
        seed=config.seed,
        dtype=default_dtype(),
    )
    state = jax.device_put(init_state(start.params, optimizer), replicated(mesh))
    identity = _identity(config, verifier, examples, start.vocabulary)
    checkpoints = Checkpoints(workdir / "checkpoints", config.keep_checkpoints, identity)
    state = checkpoints.restore(state) or state
    write_account(workdir / "data.json", dataset, config.data.conversations)
    with replacing(workdir / "config.json") as temporary:
        temporary.write_text(config.to_json_best_effort(indent=1) + "\n")
    first, total = int(state.step), config.total_steps
    exported = workdir / "drafter"
    if first < total:
        head = head_table(verifier.params)
        head = head if start.vocabulary is None else head[jnp.asarray(start.vocabulary)]
        frozen = jax.device_put(Frozen(embedding_table(verifier.params), head), replicated(mesh))
        source = _feature_source(config, workdir, verifier, examples)
        log = MetricsLog(workdir / "metrics.jsonl", first)
        batches = _Batches(config, examples, source, rows_over_data(mesh, axis=1))
        bar = cli.progress(batches.after(first), "training", total, initial=first)
        started, seen = (
            time.perf_counter(),
            [],
        )  # steps are looked at now and then, not to wait for the device each time
        with TerminationRequest() as termination:
            for step, batch in enumerate(bar, start=first + 1):
                state, metrics = train_step(state, frozen, batch)
                seen.append(Step(step, metrics.loss, batch.row, metrics.supervised))
                ends = step == total or termination.received
                logs, saves = (ends or step % every == 0 for every in (config.log_every, config.checkpoint_every))
                if logs or saves:
                    check_finite(seen, checkpoints.latest_step())
                if logs:
                    tokens = sum(jax.device_get([one.supervised for one in seen]))
                    speed = tokens / (time.perf_counter() - started)
                    bar.set_postfix_str(log.write(step, metrics, float(schedule(step - 1)), speed), refresh=False)
                    started, seen = time.perf_counter(), []
                if saves:
                    checkpoints.save(step, state)
                if ends:
                    break
        if step < total:
            checkpoints.close()
            print(f"{workdir}: asked to terminate, saved step {step} of {total}; the same command goes on from there")
            sys.exit(0)
    elif first:
        print(f"{workdir}: already trained for {first} steps")
    checkpoints.close()
    write_drafter(exported, start.config, state.params, start.vocabulary, verifier.fingerprint)
    return exported


def _load(config: ConfigDict, sources: tuple[str, ...], verifier: Verifier) -> Dataset:
    data = config.data
    return load_examples(
        sources, verifier.tokenizer, verifier.stop_tokens, data.max_length, data.system_prompt, config.seed
    )


def _start(config: ConfigDict, verifier: Verifier, examples: list[Example]) -> Start:
    size = config.data.draft_vocabulary
    vocabulary = None
    if size:
        counted = config.data.vocabulary_conversations
        counted = _load(config, counted, verifier).examples if counted else examples
        vocabulary = frequent_tokens(_answers(counted), size, verifier.stop_tokens, verifier.config.vocab_size)
        share = uncovered_share(_answers(examples), vocabulary)
        print(f"draft vocabulary: {size} tokens, {share:.2%} of answers uncovered")
    if not config.drafter.init_from:
        shape = drafter_config(verifier.config, config.drafter.fc_bias)
        return Start(shape, init_drafter(shape, jax.random.key(config.seed)), vocabulary)
    loaded = read_drafter(Path(config.drafter.init_from), jnp.float32, verifier.config)
    check_fits(loaded, verifier)
    return Start(loaded.config, cast_params(loaded.params, jnp.float32), vocabulary)


def _answers(examples: list[Example]) -> list[np.ndarray]:
    """The tokens of each example that the drafter learns to predict."""
    return [example.tokens[2:][example.supervised[:-2]] for example in examples]


def _identity(config: ConfigDict, verifier: Verifier, examples: list[Example], vocabulary: np.ndarray | None) -> dict:
    """What a checkpoint must share with the run that continues it."""
    fields = json.loads(config.to_json_best_effort())
    for name in ("total_steps", "log_every", "checkpoint_every", "keep_checkpoints", "mesh", "features", "verifier"):
        fields.pop(name)
    for name in ("conversations", "vocabulary_conversations", "system_prompt"):
        fields["data"].pop(name)  # the digest of the examples says what they come to
    proposes = None if vocabulary is None else hashlib.sha256(vocabulary.tobytes()).hexdigest()[:16]
    return {
        **fields,
        "verifier_fingerprint": verifier.fingerprint,
        "conversations": digest(examples),
        "vocabulary": proposes,
    }


def _feature_source(config: ConfigDict, workdir: Path, verifier: Verifier, examples) -> FeatureSource:
    if config.features.source == "online":
        return OnlineFeatures(verifier.module, verifier.params)
    if config.features.source != "cached" or config.features.dtype not in ("bfloat16", "float16"):
        raise InputError(
            f"features.source is {config.features.source!r}, features.dtype {config.features.dtype!r}; expected "
            "'cached' or 'online', 'bfloat16' or 'float16'"
        )
    return cache_features(
        workdir / "features",
        verifier.module,
        verifier.params,
        examples,
        verifier.fingerprint,
        config.features.dtype,
        cli.progress,
    )


class _Batches:
    """Device batches of a run, in the order that its seed fixes."""

    def __init__(self, config: ConfigDict, examples: list[Example], source: FeatureSource, sharding):
        self._examples, self._source, self._sharding = examples, source, sharding
        self._size, self._seed, self._accumulate = config.data.batch_size, config.seed, config.data.accumulate
        longest = max(len(example.tokens) for example in examples)
        self._length = -(-longest // _ROW_STEP) * _ROW_STEP
        if self._size > len(examples):
            raise InputError(f"data.batch_size is {self._size}, but there are only {len(examples)} rows to train on")

    def after(self, step: int):
        for epoch, rows in batch_rows(len(self._examples), self._size, self._seed, step):
            chosen = [self._examples[row] for row in rows]
            tokens = pad_rows([example.tokens for example in chosen], self._length)
            parts = {
                "tokens": tokens,
                "features": self._source(rows, tokens),
                "supervised": pad_rows([example.supervised for example in chosen], self._length),
                "length": np.array([len(example.tokens) for example in chosen], np.int32),
                "row": rows.astype(np.int32),
            }
            split = {name: part.reshape(self._accumulate, -1, *part.shape[1:]) for name, part in parts.items()}
            yield Batch(**jax.device_put(split, self._sharding), epoch=jnp.int32(epoch))
