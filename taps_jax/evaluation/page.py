"""report.html: one page that needs nothing else, with tables that sort, figures and the token view."""

import base64
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from taps_jax.evaluation.cells import Cell
from taps_jax.evaluation.published import published_tau
from taps_jax.evaluation.report_tables import Block, blocks
from taps_jax.evaluation.trace import Steps
from taps_jax.speculative.composition import Composition

_PARTS = Path(__file__).parent / "report_page"
_QUESTIONS = 3
_VIEW_BYTES = 7_000_000  # of all cells together; figures and tables take the rest of 10 MB
_CAPTIONS = {
    "acceptance_by_depth": "Of the steps that accepted every node above, the share that accepted one at this depth.",
    "entropy": "Mean entropy of the distributions that proposed the nodes, by what became of them.",
    "routing_shares": "Share of steps that each specialist drafted.",
    "tau_by_nodes": "Acceptance length against the verifier's work per step, with 95% intervals.",
    "speed_up": "Tokens per second against plain decoding in the same run.",
    "averaging_sweep": "Acceptance length of averages of two drafters, by the weight of the second.",
}
_DEFINITIONS = {
    "acceptance length (tau)": "tokens committed by verification steps, divided by the steps, pooled over all answers. "
    "The token that reading the prompt yields needs no step and is not counted. Intervals are 95% bootstrap intervals "
    "over questions.",
    "EAGLE's count": "committed tokens divided by the index of the last step of each turn, one less than the steps.",
    "HASS's count": "mean over questions of the mean number of accepted nodes per step, plus one.",
    "Spec-Bench's count": "mean over all steps of the accepted nodes plus one.",
    "accepted, rejected, unreached": "a drafted node is reached if its parent is the root or accepted; reached nodes "
    "are accepted or rejected, and the others never had their turn.",
    "confidence": "a node's path probability under the drafter.",
    "routing after the fact": "for each question the drafter with the greatest acceptance length (oracle), with the "
    "most confident trees, or with the first tree of least entropy; the gap is from the best single drafter to the "
    "oracle.",
    "looping": "an answer more than 30% of whose 8-grams are repeated.",
    "accuracy": "share of answers that give the reference's result. All rows of a column write the same text.",
}
_NUMBERS = (
    ("tau", "tau", 3), ("EAGLE's count", "tau_eagle", 3), ("HASS's count", "tau_hass", 3),
    ("Spec-Bench's count", "tau_spec_bench", 3), ("tau without loops", "tau_without_loops", 3),
    ("looping", "looping_share", 3), ("accuracy", "accuracy", 3), ("nodes verified", "nodes_verified", 0),
    ("nodes used", "nodes_used", 1), ("answers", "answers", 0), ("tokens", "tokens", 0), ("steps", "steps", 0),
)  # fmt: skip


def write_page(
    path: Path,
    results: Mapping[str, Any],
    cells: Iterable[Cell],
    vocabulary: Sequence[str],
    figures: Mapping[str, Path],
    speeds: Mapping,
    compare_published: bool,
) -> None:
    """Writes the page.

    Args:
      path: of report.html, or a temporary name for it.
      results: as `summary.summarise` makes them.
      cells: read one at a time.
      vocabulary: the text of every token id.
      figures: SVG files by name.
      speeds: as `speed.Speeds.found`.
      compare_published: whether the paper's numbers go beside the table's.
    """
    template = Template((_PARTS / "page.html").read_text(encoding="utf-8"))
    views = _views(cells, len(results["cells"]), vocabulary)
    page = template.substitute(
        title=html.escape(f"Drafters for {results['settings'].get('verifier', 'a verifier')}"),
        css=(_PARTS / "page.css").read_text(encoding="utf-8"),
        script=(_PARTS / "page.js").read_text(encoding="utf-8"),
        facts=_facts(results),
        summary=_summary(results),
        tables=_tables(results, speeds, compare_published),
        figures="\n".join(_figure(name, file) for name, file in figures.items()),
        definitions=_definitions(),
        views=json.dumps(views, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/"),
    )
    path.write_text(page, encoding="utf-8")


def _facts(results: Mapping[str, Any]) -> str:
    settings, cells = results["settings"], results["cells"]
    facts = {
        "verifier": settings.get("verifier"),
        "tree": settings.get("tree"),
        "most new tokens": settings.get("max_new_tokens"),
        "seed": settings.get("seed"),
        "workloads": ", ".join(dict.fromkeys(cell["workload"] for cell in cells)),
        "taps_jax": settings.get("taps_jax"),
    }
    return "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(str(value))}</dd></div>"
        for name, value in facts.items()
        if value is not None
    )


def _summary(results: Mapping[str, Any]) -> str:
    lines = []
    for block in blocks(results):
        averages = {row: block.average(row) for row in block.rows if block.average(row) is not None}
        if averages:
            best = max(averages, key=averages.get)
            others = ", ".join(f"{row} {value:.2f}" for row, value in averages.items() if row != best)
            lines.append(
                f"At temperature {block.temperature:g}, {best} commits most tokens per step, {averages[best]:.2f} on "
                f"average over workloads{f' ({others})' if others else ''}."
            )
    checks = [check for found in results["settings"].get("checks", {}).values() for check in found]
    if checks:
        same = sum(check["same_text"] and check["same_steps"] for check in checks)
        lines.append(f"{same} of {len(checks)} answers that were decoded for real took the steps that replay tells.")
    return "\n".join(f"<p>{html.escape(line)}</p>" for line in lines)


def _table(caption: str, header: Sequence[str], rows: Sequence[Sequence[tuple[str, Any, str]]]) -> str:
    """A sortable table; an entry is its HTML, the value it sorts by, and its class."""
    heads = "".join(f'<th scope="col"><button type="button">{html.escape(name)}</button></th>' for name in header)
    lines = "\n".join(
        "<tr>"
        + "".join(
            f'<td class="{kind}" data-value="{"" if value is None else html.escape(str(value))}">{text}</td>'
            for text, value, kind in row
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(caption)}"><table class="sortable">'
        f"<caption>{html.escape(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _tables(results: Mapping[str, Any], speeds: Mapping, compare_published: bool) -> str:
    parts = []
    for block in blocks(results):
        rows = [
            [(html.escape(row), row, "")]
            + [_tau_entry(block, row, name, compare_published) for name in block.workloads]
            + [_number(block.average(row), 2), _number(next(iter(cells.values()))["nodes_verified"], 0)]
            for row, cells in block.rows.items()
        ]
        caption = f"Acceptance length at temperature {block.temperature:g}"
        parts.append(_table(caption, ("row", *block.workloads, "average", "nodes per step"), rows))
    header = ("row", "workload", "temperature", *(title for title, _, _ in _NUMBERS))
    rows = [
        [
            *((html.escape(f"{cell[key]}"), cell[key], "") for key in ("row", "workload", "temperature")),
            *(_number(cell[key], digits) for _, key, digits in _NUMBERS),
        ]
        for cell in results["cells"]
    ]
    parts.append(_table("All numbers", header, rows))
    if results["offline_routing"]:
        parts.append(_offline_table(results["offline_routing"]))
    if speeds:
        rows = [
            [
                *((html.escape(f"{value}"), value, "") for value in speed[:3]),
                *(_number(value, 1) for value in speed.pair),
                _number(speed.pair[0] / speed.pair[1], 2),
                (f"{speed.identical}/{speed.answers}", speed.identical / speed.answers, ""),
            ]
            for speed in speeds.values()
        ]
        header = ("row", "workload", "temperature", "tokens/s", "plain tokens/s", "speed-up", "identical answers")
        parts.append(_table("Speed", header, rows))
    return "\n".join(parts)


def _offline_table(found: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for routed in found:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in routed["shares"].items())
        rows.append(
            [
                *((html.escape(f"{routed[key]}"), routed[key], "") for key in ("workload", "temperature", "rule")),
                (html.escape(shares), shares, ""),
                _number(routed["tau"], 2),
                _number(routed["gap_closed"], 2),
            ]
        )
    header = ("workload", "temperature", "rule", "questions", "acceptance length", "gap closed")
    return _table("Routing whole questions among the single drafters, after the fact", header, rows)


def _tau_entry(block: Block, row: str, workload: str, compare_published: bool) -> tuple[str, Any, str]:
    cell = block.rows[row][workload]
    if cell["tau"] is None:
        return "-", None, ""
    low, high = cell["tau_interval"]
    text = f"{cell['tau']:.2f}" + ("" if low is None else f" <small>{low:.2f}–{high:.2f}</small>")
    published = published_tau(row, workload, block.temperature) if compare_published else None
    if published is not None:
        text += f" <small>(paper {published:.2f})</small>"
    return text, cell["tau"], "best" if round(cell["tau"], 2) == block.best(workload) else ""


def _number(value: float | None, digits: int) -> tuple[str, Any, str]:
    return ("-", None, "") if value is None else (f"{value:.{digits}f}", value, "")


def _figure(name: str, file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    caption = html.escape(_CAPTIONS.get(name, name))
    source = f"data:image/svg+xml;base64,{data}"
    return f'<figure><img alt="{caption}" src="{source}"><figcaption>{caption}</figcaption></figure>'


def _definitions() -> str:
    entries = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in _DEFINITIONS.items())
    return f'<dl class="definitions">{entries}</dl>'


def _views(cells: Iterable[Cell], count: int, vocabulary: Sequence[str]) -> list[dict[str, Any]]:
    """What the token view shows of each cell's first questions, within the page's limit."""
    views = []
    for cell in cells:
        left = _VIEW_BYTES // max(1, count)
        questions: dict[str, list[dict]] = {}
        for answer in cell.answers:
            if answer.question_id not in questions and len(questions) == _QUESTIONS:
                break
            steps, used = _view_steps(answer.steps, vocabulary, left)
            left -= used
            key = answer.question_id, answer.turn
            questions.setdefault(answer.question_id, []).append(
                {
                    "question": cell.questions[key],
                    "pieces": cell.pieces[key],
                    "steps": steps,
                    "cut": answer.steps is not None and len(steps) < len(answer.steps.position),
                }
            )
        views.append(
            {
                "row": cell.row,
                "workload": cell.workload,
                "temperature": cell.temperature,
                "specialists": cell.specialists,
                "routed": Composition(cell.compose).routes,
                "questions": [{"id": identity, "turns": turns} for identity, turns in questions.items()],
            }
        )
    return views


def _view_steps(steps: Steps | None, vocabulary: Sequence[str], limit: int) -> tuple[list[dict], int]:
    """Steps with the nodes in use of their trees, as many as fit into `limit` bytes, and what they take."""
    found, used = [], 0
    for index in range(0 if steps is None else len(steps.position)):
        kept = np.flatnonzero(steps.drafted[index])
        places = {0: 0} | {int(node): place for place, node in enumerate(kept, start=1)}
        nodes = [{"text": vocabulary[steps.token[index, 0]], "parent": None, "origin": 0, "accepted": False}]
        nodes += [
            {
                "text": vocabulary[steps.token[index, node]],
                "parent": places[int(steps.parent[index, node])],
                "probability": float(f"{np.exp(steps.log_prob[index, node]):.3g}"),
                "origin": int(steps.origin[index, node]),
                "accepted": bool(steps.accepted[index, node]),
            }
            for node in kept
        ]
        step = {
            "position": int(steps.position[index]),
            "committed": int(steps.committed[index]),
            "chosen": int(steps.chosen[index]),
            "nodes": nodes,
        }
        used += len(json.dumps(step, ensure_ascii=False).encode())
        if used > limit:
            break
        found.append(step)
    return found, used
