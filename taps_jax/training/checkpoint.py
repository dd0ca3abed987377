"""Training checkpoints through orbax: the drafter's parameters, optimizer state, step and what they belong to."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from taps_jax.errors import InputError
from taps_jax.training.step import TrainState

_SCORE = "acceptance_length"


class Checkpoints:
    """The checkpoints of one run; the verifier is never stored.

    Args:
      folder: of the checkpoints.
      latest: how many of the newest are kept.
      best: how many of those with the highest held-out acceptance length are kept, be they old; 0 if none is scored.
      identity: what a run's state depends on (verifier fingerprint, data, objective): a checkpoint with another
        identity is refused rather than continued.
    """

    def __init__(self, folder: Path, latest: int, best: int, identity: dict[str, Any]):
        score = lambda metrics: metrics[_SCORE]
        by_score = BestN(get_metric_fn=score, n=best, keep_checkpoints_without_metrics=False)
        # A rule that kept the best only could delete the newest, from which a run goes on.
        kept = AnyPreservationPolicy([LatestN(latest), by_score])
        options = ocp.CheckpointManagerOptions(preservation_policy=kept, best_fn=score if best else None, create=True)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)
        self._folder, self._identity = folder, identity

    def save(self, step: int, state: TrainState, acceptance_length: float | None) -> None:
        """Starts writing `state`; it appears when complete."""
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), identity=ocp.args.JsonSave(self._identity))
        metrics = None if acceptance_length is None else {_SCORE: acceptance_length}
        self._manager.save(step, args=items, metrics=metrics)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def best(self) -> tuple[int, float] | None:
        """Step and held-out acceptance length of the best checkpoint kept; None if none was scored."""
        scored = [(step, self._manager.metrics(step)) for step in self._manager.all_steps()]
        scored = [(step, metrics[_SCORE]) for step, metrics in scored if metrics]
        return max(scored, key=lambda found: found[1], default=None)

    def restore(self, state: TrainState) -> TrainState | None:
        """The newest checkpoint in the shapes and shardings of `state`; None if there is none.

        Raises:
          InputError: it belongs to another run.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        items = ocp.args.Composite(identity=ocp.args.JsonRestore())
        found = self._manager.restore(step, args=items).identity
        changed = [name for name in self._identity if found.get(name) != self._identity[name]]
        if changed:
            raise InputError(
                f"{self._folder}: checkpoint {step} was trained with another {', '.join(changed)}; "
                "use another --workdir or the same settings"
            )
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        return self._manager.restore(step, args=items).state

    def close(self) -> None:
        """Waits for writes under way."""
        self._manager.wait_until_finished()
        self._manager.close()
