"""Training a drafter from a configuration: data, features, steps, metrics, checkpoints, export."""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from taps_jax import cli, processes
from taps_jax.checkpoints.hf_drafter import write_drafter
from taps_jax.checkpoints.verifier import Verifier, default_dtype, load_verifier
from taps_jax.data.examples import write_account
from taps_jax.errors import InputError
from taps_jax.files import replacing
from taps_jax.loading import parsed_tree, tree_shape
from taps_jax.memory import peak_memory_gb
from taps_jax.models.drafter import Drafter
from taps_jax.models.llama import embedding_table, head_table
from taps_jax.sharding import make_mesh, replicated, rows_over_data
from taps_jax.training.checkpoint import Checkpoints
from taps_jax.training.features import FeatureSource, OnlineFeatures, cache_features
from taps_jax.training.feeding import Feeder, Order
from taps_jax.training.guard import Step, TerminationRequest, check_finite
from taps_jax.training.heldout import HeldOut
from taps_jax.training.metrics import MetricsLog
from taps_jax.training.objective import LossWeights
from taps_jax.training.start import Rows, Start, first_drafter, load_rows, run_identity
from taps_jax.training.step import Frozen, TrainState, init_state, make_optimizer, make_train_step


def train(config: ConfigDict, workdir: Path) -> Path:
    """Trains the drafter that `config` describes, going on from the newest checkpoint in `workdir`.

    Args:
      config: as made by `base_config`.
      workdir: gets `checkpoints/`, `features/`, `metrics.jsonl`, `config.json` and, at the end, `drafter/`. Several
        processes share it.
    Returns:
      The exported drafter's directory.
    Raises:
      InputError: a setting or file is bad, the workdir belongs to another run, or the loss is no number.
    """
    mesh = make_mesh(config.mesh.data, config.mesh.tensor)
    _check_batch(config, mesh)
    verifier = load_verifier(config.verifier, mesh=mesh)
    rows = load_rows(config, verifier)
    print(f"conversations: {len(rows.training):,} to train on\n{rows.dataset.account()}")
    start = first_drafter(config, verifier, rows.training)
    heldout = _held_out(config, verifier, start, rows)
    optimizer, schedule = make_optimizer(**config.optimizer)
    state = jax.device_put(init_state(start.params, optimizer), replicated(mesh))
    identity = run_identity(config, verifier, rows.training, start.vocabulary)
    checkpoints = Checkpoints(
        workdir / "checkpoints", config.keep_checkpoints, config.keep_best if heldout else 0, identity
    )
    state = checkpoints.restore(state) or state
    if processes.is_first():
        write_account(workdir / "data.json", rows.dataset, config.data.conversations)
        with replacing(workdir / "config.json") as temporary:
            temporary.write_text(config.to_json_best_effort(indent=1) + "\n")
    first = int(state.step)
    if first >= config.total_steps:
        print(f"{workdir}: already trained for {first} steps")
    else:
        source = _feature_source(config, workdir, verifier, rows)
        data = config.data
        order = Order(data.batch_size, data.accumulate, data.length_window, config.seed)
        feeder = Feeder(order, rows.training, source, rows_over_data(mesh, axis=1))
        run = _Run(config, workdir, _frozen(verifier, start, mesh), heldout, checkpoints, schedule)
        state = run.steps(_train_step(config, start, optimizer), state, feeder)
        if int(state.step) < config.total_steps:
            checkpoints.close()
            print(
                f"{workdir}: asked to terminate, saved step {int(state.step)} of {config.total_steps}; the same "
                "command goes on from there"
            )
            sys.exit(0)
    best = checkpoints.best()
    if best:
        print(f"held-out acceptance length: {best[1]:.3f} at step {best[0]}, the best of the checkpoints kept")
    checkpoints.close()
    exported = workdir / "drafter"
    if processes.is_first():
        write_drafter(exported, start.config, state.params, start.vocabulary, verifier.fingerprint)
    processes.wait_for_all("export")
    return exported


class _Run:
    """The steps of a run, and what is written as they are taken."""

    def __init__(self, config: ConfigDict, workdir: Path, frozen: Frozen, heldout, checkpoints, schedule):
        self._config, self._workdir, self._frozen = config, workdir, frozen
        self._heldout, self._checkpoints, self._schedule = heldout, checkpoints, schedule

    def steps(self, train_step, state: TrainState, feeder: Feeder) -> TrainState:
        """Trains to the last step, or to where the process is asked to terminate; that step is saved."""
        config, first = self._config, int(state.step)
        log = self._log(first)
        bar = cli.progress(feeder.after(first), "training", config.total_steps, initial=first)
        started, seen = time.perf_counter(), []  # looked at now and then, not to wait for the device each step
        with TerminationRequest() as termination:
            for step, (rows, batch) in enumerate(bar, start=first + 1):
                state, metrics = train_step(state, self._frozen, batch)
                seen.append(Step(step, metrics.loss, rows, metrics.supervised))
                ends = step == config.total_steps or termination.ends_at(step)
                saves = ends or step % config.checkpoint_every == 0
                if not saves and step % config.log_every:
                    continue
                check_finite(seen, self._checkpoints.latest_step())
                tokens = sum(jax.device_get([one.supervised for one in seen]))
                others = {
                    "learning_rate": float(self._schedule(step - 1)),
                    "tokens_per_second": round(float(tokens) / (time.perf_counter() - started), 1),
                    "peak_memory_gb": round(peak_memory_gb(), 3),
                }
                if saves and self._heldout:
                    others["acceptance_length"] = round(self._heldout.acceptance_length(state.params), 4)
                if log:
                    bar.set_postfix_str(log.write(step, metrics, **others), refresh=False)
                if saves:
                    self._checkpoints.save(step, state, others.get("acceptance_length"))
                if ends:
                    break
                started, seen = time.perf_counter(), []
        if log:
            log.close()
        return state

    def _log(self, first: int) -> MetricsLog | None:
        """Of the first process only."""
        if not processes.is_first():
            return None
        settings = self._config.to_dict()
        return MetricsLog(self._workdir / "metrics.jsonl", first, self._config.wandb_project, settings)


def _check_batch(config: ConfigDict, mesh: Mesh) -> None:
    data, devices = config.data, mesh.shape["data"]
    if data.batch_size % (data.accumulate * devices):
        raise InputError(
            f"data.batch_size {data.batch_size} must be a multiple of data.accumulate {data.accumulate} times the "
            f"{devices} devices of the data axis"
        )
    weights, passes = config.objective.pass_weights, config.objective.passes
    if weights and len(weights) != passes:
        raise InputError(f"objective.pass_weights has {len(weights)} numbers, expected one for each of {passes} passes")


def _held_out(config: ConfigDict, verifier: Verifier, start: Start, rows: Rows) -> HeldOut | None:
    if not rows.heldout:
        return None
    shape = parsed_tree(config.heldout.tree, "heldout.tree") or tree_shape()
    drafter = Drafter(start.config)
    heldout = HeldOut(verifier.module, verifier.params, drafter, start.vocabulary, rows.heldout, shape)
    if start.vocabulary is not None:
        share = heldout.uncovered_mass()
        print(f"held out: {len(rows.heldout)} rows, {share:.2%} of the verifier's probability outside the vocabulary")
    return heldout


def _train_step(config: ConfigDict, start: Start, optimizer):
    objective = config.objective
    weights = LossWeights(
        objective.feature_weight,
        objective.soft_weight,
        objective.topk_weight,
        objective.topk,
        objective.overlap_weight,
        tuple(objective.pass_weights),
    )
    return make_train_step(
        Drafter(start.config),
        optimizer,
        weights=weights,
        passes=objective.passes,
        noise=objective.noise,
        zero_logit_mask=objective.zero_logit_mask,
        seed=config.seed,
        dtype=default_dtype(),
    )


def _frozen(verifier: Verifier, start: Start, mesh: Mesh) -> Frozen:
    head = head_table(verifier.params)
    head = head if start.vocabulary is None else head[jnp.asarray(start.vocabulary)]
    return jax.device_put(Frozen(embedding_table(verifier.params), head), replicated(mesh))


def _feature_source(config: ConfigDict, workdir: Path, verifier: Verifier, rows: Rows) -> FeatureSource:
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
        rows.training,
        verifier.fingerprint,
        config.features.dtype,
        cli.progress,
    )
