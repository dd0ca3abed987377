"""Makes the report of a table anew from its working folder, without decoding.

python -m taps_jax.report --workdir=runs/table-smollm2 [--compare_published]
"""

from pathlib import Path

from absl import flags

from taps_jax import cli
from taps_jax.evaluation.report import write_report
from taps_jax.evaluation.store import load_cells
from taps_jax.evaluation.summary import summarise

_WORKDIR = flags.DEFINE_string("workdir", None, "Working folder of eval --config.", required=True)
_COMPARE_PUBLISHED = flags.DEFINE_bool("compare_published", False, "Put the paper's numbers beside the table's.")


def main() -> None:
    workdir = Path(_WORKDIR.value)
    settings, cells = load_cells(workdir)
    write_report(workdir, summarise(cells, settings), cells, _COMPARE_PUBLISHED.value)
    print((workdir / "table.md").read_text(encoding="utf-8"))
    print(workdir / "report.html")


if __name__ == "__main__":
    cli.run(main)
