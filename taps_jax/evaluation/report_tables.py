"""A table laid out like the paper's: rows by workloads, one block per temperature; and every number as CSV."""

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from taps_jax.evaluation.published import published_tau
from taps_jax.evaluation.tables import format_table

# Columns of table.csv that hold one value each.
_PLAIN = (
    "row", "workload", "temperature", "compose", "questions", "answers", "tokens", "committed", "steps", "tau",
    "tau_eagle", "tau_hass", "tau_spec_bench", "nodes_verified", "nodes_used", "looping_share", "tau_without_loops",
    "accuracy",
)  # fmt: skip


class Block(NamedTuple):
    """One temperature's table of tau.

    Attributes:
      temperature: 0 is greedy.
      workloads: columns.
      rows: cells by workload for each row.
    """

    temperature: float
    workloads: tuple[str, ...]
    rows: dict[str, dict[str, dict[str, Any]]]

    def average(self, row: str) -> float | None:
        """Mean of a row's tau over workloads, None if one is missing."""
        values = [self.rows[row][name]["tau"] for name in self.workloads]
        return None if None in values else sum(values) / len(values)

    def best(self, workload: str) -> float | None:
        """The greatest tau of a column as it is printed."""
        values = [cells[workload]["tau"] for cells in self.rows.values() if cells[workload]["tau"] is not None]
        return round(max(values), 2) if values else None


def blocks(results: Mapping[str, Any]) -> Iterator[Block]:
    """Results by temperature, in their order."""
    cells = results["cells"]
    for temperature in dict.fromkeys(cell["temperature"] for cell in cells):
        chosen = [cell for cell in cells if cell["temperature"] == temperature]
        rows: dict[str, dict[str, dict]] = {}
        for cell in chosen:
            rows.setdefault(cell["row"], {})[cell["workload"]] = cell
        yield Block(temperature, tuple(dict.fromkeys(cell["workload"] for cell in chosen)), rows)


def markdown(results: Mapping[str, Any], compare_published: bool = False) -> str:
    """table.md."""
    parts = []
    for block in blocks(results):
        header = ("acceptance length", *block.workloads, "average", "nodes per step")
        rows = [(label, *_entries(block, label, compare_published)) for label in block.rows]
        parts.append(f"Temperature {block.temperature:g}\n\n{format_table(header, rows)}\n")
    note = "± is half a 95% bootstrap interval over questions."
    if compare_published:
        note += " In parentheses: the paper's, with other weights where the row's drafters are one's own."
    return "\n".join([*parts, note + _checked(results), ""])


def _entries(block: Block, label: str, compare_published: bool) -> list[str]:
    cells = block.rows[label]
    entries = []
    for name in block.workloads:
        tau, (low, high) = cells[name]["tau"], cells[name]["tau_interval"]
        text = "-" if tau is None else f"{tau:.2f}" + ("" if low is None else f" ± {(high - low) / 2:.2f}")
        published = published_tau(label, name, block.temperature) if compare_published else None
        entries.append(text + ("" if published is None else f" ({published:.2f})"))
    average = block.average(label)
    nodes = next(iter(cells.values()))["nodes_verified"]
    return [*entries, "-" if average is None else f"{average:.2f}", str(nodes)]


def _checked(results: Mapping[str, Any]) -> str:
    """A sentence on how real decoding compared with replay."""
    found = [check for checks in results["settings"].get("checks", {}).values() for check in checks]
    if not found:
        return ""
    same = sum(check["same_text"] and check["same_steps"] for check in found)
    return f" Replayed; {same} of {len(found)} answers decoded for real took the same steps."


def latex(results: Mapping[str, Any]) -> str:
    """table.tex, for the package booktabs; the best of a column is bold."""
    lines = []
    for block in blocks(results):
        lines += [
            f"\\begin{{tabular}}{{l{'r' * (len(block.workloads) + 1)}}}",
            "\\toprule",
            " & ".join([f"$T={block.temperature:g}$", *map(_escaped, block.workloads), "average"]) + " \\\\",
            "\\midrule",
        ]
        for label, cells in block.rows.items():
            entries = []
            for name in block.workloads:
                tau = cells[name]["tau"]
                text = "--" if tau is None else f"{tau:.2f}"
                best = tau is not None and round(tau, 2) == block.best(name)
                entries.append(f"\\textbf{{{text}}}" if best else text)
            average = block.average(label)
            entries.append("--" if average is None else f"{average:.2f}")
            lines.append(" & ".join([_escaped(label), *entries]) + " \\\\")
        lines += ["\\bottomrule", "\\end{tabular}", ""]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "&%$#_{}" else letter for letter in text)


def comma_separated(results: Mapping[str, Any]) -> str:
    """table.csv, a cell a line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    depths = max((len(cell["acceptance_by_depth"]) for cell in results["cells"]), default=0)
    kinds = [(kind, value) for kind in ("accepted", "rejected", "unreached") for value in ("confidence", "entropy")]
    writer.writerow(
        [*_PLAIN, "tau_low", "tau_high", *(f"accepted_at_{depth}" for depth in range(1, depths + 1))]
        + [f"{kind}_{value}" for kind, value in kinds]
        + ["routing_shares", "origin_shares"]
    )
    for cell in results["cells"]:
        by_depth = cell["acceptance_by_depth"] + [None] * (depths - len(cell["acceptance_by_depth"]))
        shares = [
            " ".join(f"{name}={share}" for name, share in (cell[kind] or {}).items())
            for kind in ("routing_shares", "origin_shares")
        ]
        means = [cell["nodes"][kind][value] for kind, value in kinds]
        writer.writerow([*(cell[name] for name in _PLAIN), *cell["tau_interval"], *by_depth, *means, *shares])
    return out.getvalue()
