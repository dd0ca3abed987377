"""What ends a run before its last step: a request to terminate, or a loss that is not a number."""

import signal
from typing import NamedTuple

import jax
import numpy as np
from jax import Array

from taps_jax.errors import InputError


class TerminationRequest:
    """Within the block, SIGTERM sets `received` instead of ending the process, so that the step can be finished."""

    received = False

    def __enter__(self) -> "TerminationRequest":
        self._before = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(self, kind, error, trace) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _receive(self, number, frame) -> None:
        self.received = True


class Step(NamedTuple):
    """What is kept of a step until the next time the host looks: its number, loss, rows and supervised positions."""

    number: int
    loss: Array
    rows: Array
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
            rows = np.asarray(step.rows).ravel().tolist()
            good = f"checkpoint {last_good} is the last good one" if last_good else "there is no checkpoint yet"
            raise InputError(
                f"the loss is {loss} at step {step.number}, whose rows are {rows}; {good}; "
                "look at these rows or lower optimizer.learning_rate"
            )
