"""Draws the curves of training runs: loss, agreement with the verifier, held-out acceptance length, learning rate.

    python -m taps_jax.plot --workdir=runs/smollm2[,runs/other]

Writes training_curves.png and .svg in the first workdir; several runs share the axes, each in its colour.
"""

from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from taps_jax import cli
from taps_jax.evaluation.figures import COLOURS, save_figure
from taps_jax.training.metrics import read_metrics

_WORKDIR = flags.DEFINE_list("workdir", None, "Working folders of training runs.", required=True)
_SMOOTH = flags.DEFINE_integer("smooth", 10, "Logged steps that a curve's points are the mean of.", lower_bound=1)

_PASS_LINES = ("-", "--", ":", "-.")


def main() -> None:
    workdirs = [Path(name) for name in _WORKDIR.value]
    runs = {workdir.name: read_metrics(workdir / "metrics.jsonl") for workdir in workdirs}
    path = workdirs[0] / "training_curves"
    save_figure(path, lambda pyplot: _draw(pyplot, runs, _SMOOTH.value))
    for name, rows in runs.items():
        found = [row["acceptance_length"] for row in rows if "acceptance_length" in row]
        best = f", best held-out acceptance length {max(found):.2f}" if found else ""
        print(f"{name}: {rows[-1]['step']:,} steps, loss {rows[-1]['loss']:.3f}{best}")
    print(f"{path}.png")


def _draw(pyplot, runs: dict[str, list[dict[str, Any]]], smooth: int):
    figure, ((loss, agreement), (acceptance, rate)) = pyplot.subplots(2, 2, figsize=(8.4, 5.6), sharex=True)
    for place, rows in enumerate(runs.values()):
        colour = COLOURS[place % len(COLOURS)]
        steps = [row["step"] for row in rows]
        loss.plot(*_smoothed(steps, [row["loss"] for row in rows], smooth), color=colour, lw=1.2)
        passes = np.array([row["agreement"] for row in rows])
        for number, values in enumerate(passes.T):
            line = _PASS_LINES[number % len(_PASS_LINES)]
            agreement.plot(*_smoothed(steps, values, smooth), color=colour, ls=line, lw=1.2)
        tried = [(row["step"], row["acceptance_length"]) for row in rows if "acceptance_length" in row]
        acceptance.plot(*zip(*tried, strict=True), color=colour, marker="o", ms=3, lw=1.2) if tried else None
        rate.plot(steps, [row["learning_rate"] for row in rows], color=colour, lw=1.2)
    for axis, title in (
        (loss, "loss"),
        (agreement, "agreement with the verifier, by pass"),
        (acceptance, "held-out acceptance length"),
        (rate, "learning rate"),
    ):
        axis.set_title(title, fontsize=9, loc="left")
    if not acceptance.has_data():
        acceptance.text(0.5, 0.5, "no held-out rows", transform=acceptance.transAxes, ha="center", color="#666666")
        acceptance.set_yticks([])
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))
    acceptance.set_xlabel("step")
    rate.set_xlabel("step")
    most = max(len(rows[0]["agreement"]) for rows in runs.values())
    handles = [pyplot.Line2D([], [], color=COLOURS[place % len(COLOURS)]) for place in range(len(runs))]
    handles += [pyplot.Line2D([], [], color="#444444", ls=_PASS_LINES[n % len(_PASS_LINES)]) for n in range(most)]
    labels = [*runs, *(f"pass {number}" for number in range(1, most + 1))]
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=8)
    return figure


def _smoothed(steps, values, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Running means of `count` values, each at the last of its steps."""
    count = min(count, len(values))
    means = np.convolve(values, np.ones(count) / count, mode="valid")
    return np.asarray(steps)[count - 1 :], means


if __name__ == "__main__":
    cli.run(main)
