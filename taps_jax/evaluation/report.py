"""Everything that a grid's working folder shows: results.json, tables, figures and the page."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from taps_jax.evaluation.cells import Cell
from taps_jax.evaluation.figures import draw_figures
from taps_jax.evaluation.page import write_page
from taps_jax.evaluation.report_tables import comma_separated, latex, markdown
from taps_jax.evaluation.speed import Speeds
from taps_jax.evaluation.store import read_vocabulary
from taps_jax.files import replacing

_SWEEP = "averaging_sweep"  # drawn by the command that computes it


def write_report(
    workdir: Path, results: Mapping[str, Any], cells: Iterable[Cell], compare_published: bool = False
) -> None:
    """Writes results.json, table.md, table.csv, table.tex, figures/ and report.html.

    Args:
      workdir: the working folder, with the verifier's vocabulary and perhaps speeds.
      results: as `summary.summarise` makes them.
      cells: the same cells, for the token view.
      compare_published: put the paper's numbers beside these.
    """
    texts = {
        "results.json": json.dumps(results, indent=1, ensure_ascii=False) + "\n",
        "table.md": markdown(results, compare_published),
        "table.csv": comma_separated(results),
        "table.tex": latex(results),
    }
    for name, text in texts.items():
        with replacing(workdir / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    speeds = Speeds(workdir).found
    folder = workdir / "figures"
    names = draw_figures(results, speeds, folder)
    if (folder / f"{_SWEEP}.svg").exists():
        names.append(_SWEEP)
    figures = {name: folder / f"{name}.svg" for name in names}
    with replacing(workdir / "report.html") as temporary:
        write_page(temporary, results, cells, read_vocabulary(workdir), figures, speeds, compare_published)
