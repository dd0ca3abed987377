"""The figures of a report, each as PNG and SVG; matplotlib comes with the extra `figures`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from taps_jax.errors import InputError
from taps_jax.files import replacing

# Okabe and Ito's colours, which stay apart for colour-blind readers; rows beyond them get other line styles.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#6B6B6B", "#000000")
_LINES = ("-", "--", ":", "-.")
_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "taps_jax",  # the same bytes in every run
    "savefig.dpi": 150,
}


def draw_figures(results: Mapping[str, Any], speeds: Mapping, folder: Path) -> list[str]:
    """Draws every figure that there is something to show for.

    Args:
      results: as `summary.summarise` makes them.
      speeds: by (row, workload, temperature), as `speed.Speeds.found`.
      folder: gets NAME.png and NAME.svg.
    Returns:
      Their names.
    Raises:
      InputError: matplotlib is not installed.
    """
    cells = results["cells"]
    drawn = []
    for name, draw, shown in (
        ("acceptance_by_depth", _depths, cells),
        ("entropy", _entropies, cells),
        ("routing_shares", _shares, [cell for cell in cells if cell["routing_shares"]]),
        ("tau_by_nodes", _tau_by_nodes, cells),
        ("speed_up", _speed_ups, list(speeds.values())),
    ):
        if shown:
            save_figure(folder / name, lambda pyplot, draw=draw, shown=shown: draw(pyplot, shown))
            drawn.append(name)
    return drawn


def save_figure(path: Path, draw: Callable) -> None:
    """Draws a figure with `draw(pyplot)`, which returns it, and saves it as `path`.png and .svg.

    Raises:
      InputError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("figures need matplotlib, run: python -m pip install 'taps_jax[figures]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(_STYLE):
        figure = draw(pyplot)
        for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None, "Creator": None})):
            with replacing(path.with_name(path.name + suffix)) as temporary:
                figure.savefig(temporary, format=suffix[1:], metadata=metadata)
        pyplot.close(figure)


def _columns(cells: Sequence[Mapping]) -> tuple[list[str], list[float], list[str]]:
    """Workloads, temperatures and rows in their order."""
    return tuple(list(dict.fromkeys(cell[key] for cell in cells)) for key in ("workload", "temperature", "row"))


def _panels(pyplot, cells: Sequence[Mapping], width: float = 2.5, height: float = 2.1):
    """A panel per temperature and workload, with the cells it shows."""
    workloads, temperatures, _ = _columns(cells)
    size = (width * len(workloads) + 0.4, height * len(temperatures) + 1.0)
    figure, axes = pyplot.subplots(
        len(temperatures), len(workloads), figsize=size, sharex=True, sharey=True, squeeze=False
    )
    panels = []
    for line, temperature in zip(axes, temperatures, strict=True):
        for axis, workload in zip(line, workloads, strict=True):
            axis.set_title(f"{workload}, T={temperature:g}", fontsize=9)
            panels.append((axis, [c for c in cells if (c["workload"], c["temperature"]) == (workload, temperature)]))
    return figure, axes, panels


def _style(rows: Sequence[str], row: str) -> dict[str, Any]:
    place = rows.index(row)
    return {
        "color": COLOURS[place % len(COLOURS)],
        "linestyle": _LINES[place // len(COLOURS) % len(_LINES)],
    }


def _legend(figure, handles, labels) -> None:
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)


def _depths(pyplot, cells):
    rows = _columns(cells)[2]
    figure, axes, panels = _panels(pyplot, cells)
    for axis, shown in panels:
        for cell in shown:
            shares = [float("nan") if share is None else share for share in cell["acceptance_by_depth"]]
            axis.plot(range(1, len(shares) + 1), shares, marker="o", ms=3, lw=1.4, **_style(rows, cell["row"]))
        axis.set_ylim(0, 1)
        axis.xaxis.get_major_locator().set_params(integer=True)
    for line in axes:
        line[0].set_ylabel("acceptance rate")
    for axis in axes[-1]:
        axis.set_xlabel("depth")
    lines = [pyplot.Line2D([], [], marker="o", ms=3, lw=1.4, **_style(rows, row)) for row in rows]
    _legend(figure, lines, rows)
    return figure


def _entropies(pyplot, cells):
    kinds = {"accepted": "#009E73", "rejected": "#D55E00", "unreached": "#BBBBBB"}
    rows = _columns(cells)[2]
    figure, axes, panels = _panels(pyplot, cells, height=0.28 * len(rows) + 0.9)
    for axis, shown in panels:
        for place, cell in enumerate(shown):
            for index, (kind, colour) in enumerate(kinds.items()):
                value = cell["nodes"][kind]["entropy"]
                axis.barh(place + (index - 1) * 0.27, value or 0.0, 0.25, color=colour)
        axis.set_yticks(range(len(shown)), [cell["row"] for cell in shown], fontsize=8)
        axis.set_ylim(len(shown) - 0.5, -0.5)
        axis.grid(axis="y", visible=False)
    for axis in axes[-1]:
        axis.set_xlabel("draft entropy, nats")
    _legend(figure, [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in kinds.values()], list(kinds))
    return figure


def _shares(pyplot, cells):
    names = list(dict.fromkeys(name for cell in cells for name in cell["routing_shares"]))
    rows = _columns(cells)[2]
    figure, axes, panels = _panels(pyplot, cells, height=0.3 * len(rows) + 0.8)
    for axis, shown in panels:
        for place, cell in enumerate(shown):
            left = 0.0
            for index, name in enumerate(names):
                share = cell["routing_shares"].get(name) or 0.0
                axis.barh(place, share, 0.7, left=left, color=COLOURS[index % len(COLOURS)])
                if share > 0.15:
                    axis.text(left + share / 2, place, f"{share:.0%}", ha="center", va="center", color="w", fontsize=7)
                left += share
        axis.set_yticks(range(len(shown)), [cell["row"] for cell in shown], fontsize=8)
        axis.set_ylim(len(shown) - 0.5, -0.5)
        axis.set_xlim(0, 1)
        axis.grid(visible=False)
    for axis in axes[-1]:
        axis.set_xlabel("share of steps")
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(names))]
    _legend(figure, [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in colours], names)
    return figure


def _tau_by_nodes(pyplot, cells):
    rows = _columns(cells)[2]
    figure, axes, panels = _panels(pyplot, cells)
    for axis, shown in panels:
        for cell in shown:
            if cell["tau"] is None:
                continue
            low, high = cell["tau_interval"]
            colour = _style(rows, cell["row"])["color"]
            marker = "os^D"[rows.index(cell["row"]) // len(COLOURS) % 4]
            error = [[cell["tau"] - low], [high - cell["tau"]]]
            # Rows with as many nodes would hide each other.
            shift = (rows.index(cell["row"]) / max(1, len(rows) - 1) - 0.5) * 0.06 * cell["nodes_verified"]
            axis.errorbar(cell["nodes_verified"] + shift, cell["tau"], error, fmt=marker, ms=4, lw=1, color=colour)
    for line in axes:
        line[0].set_ylabel("acceptance length")
    for axis in axes[-1]:
        axis.set_xlabel("nodes verified per step")
    handles = [
        pyplot.Line2D([], [], ls="", marker="os^D"[place // len(COLOURS) % 4], ms=4, color=_style(rows, row)["color"])
        for place, row in enumerate(rows)
    ]
    _legend(figure, handles, rows)
    return figure


def _speed_ups(pyplot, speeds):
    cells = [speed._asdict() for speed in speeds]
    rows = _columns(cells)[2]
    figure, axes, panels = _panels(pyplot, cells, height=0.22 * len(rows) + 0.8)
    for axis, shown in panels:
        for place, speed in enumerate(shown):
            plain = speed["plain_tokens"] / speed["plain_seconds"]
            value = speed["tokens"] / speed["seconds"] / plain
            axis.barh(place, value, 0.7, color=COLOURS[0])
            axis.text(value, place, f" {value:.2f}x", va="center", fontsize=7)
        axis.axvline(1, color="#444444", lw=0.8)
        axis.set_yticks(range(len(shown)), [speed["row"] for speed in shown], fontsize=8)
        axis.set_ylim(len(shown) - 0.5, -0.5)
        axis.margins(x=0.2)
        axis.grid(axis="y", visible=False)
    for axis in axes[-1]:
        axis.set_xlabel("tokens/s against plain decoding")
    return figure
