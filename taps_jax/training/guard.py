"""What ends a run before its last step: a request to terminate, or a loss that is not a number."""

import signal
from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils

from taps_jax.errors import InputError


class TerminationRequest:
    """Within the block, SIGTERM does not end the process, so that the step can be finished."""

    _received = False

    def __enter__(self) -> "TerminationRequest":
        # With several processes, JAX's coordination service takes the signal and picks a step that all can reach.
        self._alone = jax.process_count() == 1
        if self._alone:
            self._before = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(self, kind, error, trace) -> None:
        if self._alone:
            signal.signal(signal.SIGTERM, self._before)

    def ends_at(self, step: int) -> bool:
        """Whether the run should end after `step`; the same answer in all processes."""
        return self._received if self._alone else multihost_utils.reached_preemption_sync_point(step)

    def _receive(self, number, frame) -> None:
        self._received = True


class Step(NamedTuple):
    """What is kept of a step until the next time the host looks: its number, loss, rows and supervised positions."""

    number: int
    loss: Array
    rows: np.ndarray
    supervised: Array


def check_finite(steps: list[Step], last_good: int | None) -> None:
    """Stops a run whose loss is no number, before anything of it is stored.

    Args:
      steps: those not looked at yet.
      last_good: step of the newest checkpoint.
    Raises:
      InputError: a loss is not finite; names the step, the rows of its batch, and where to go on from.
    """
    losses = jax.device_get([step.loss for step in steps])
    for step, loss in zip(steps, losses, strict=True):
        if not np.isfinite(loss):
            rows = step.rows.tolist()
            good = f"checkpoint {last_good} is the last good one" if last_good else "there is no checkpoint yet"
            raise InputError(
                f"the loss is {loss} at step {step.number}, whose rows are {rows}; {good}; "
                "look at these rows or lower optimizer.learning_rate"
            )
