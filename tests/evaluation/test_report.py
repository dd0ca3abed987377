"""A report's files: the same bytes every time, laid out as promised, and a page that works in a browser."""

import csv
import html
import io
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from taps_jax.evaluation.cells import Cell
from taps_jax.evaluation.published import published_tau
from taps_jax.evaluation.report import write_report
from taps_jax.evaluation.report_tables import comma_separated, latex, markdown
from taps_jax.evaluation.speed import Speed, Speeds
from taps_jax.evaluation.store import write_vocabulary
from taps_jax.evaluation.summary import summarise
from taps_jax.evaluation.trace import TracedAnswer, stack_steps

CHROMIUM = shutil.which("chromium")
VOCABULARY = [f" word{token}" for token in range(19)] + ["</script><b>"]


def make_answer(rng, question: str, compose: str) -> TracedAnswer:
    """Steps of a chain of two nodes and a sibling, of which a random part is accepted."""
    rows, position = [], 0
    for _ in range(8):
        accepted = rng.integers(3)
        probs = sorted(rng.uniform(0.1, 0.9, 3), reverse=True)
        chosen = int(rng.integers(2)) if compose.startswith("route") else 0
        tree = rng.integers(20, size=4), (0, 0, 1, 0), (0.0, *np.log(probs)), (0.0, *rng.uniform(0, 3, 3))
        origins = (0, *rng.integers(1, 4, 3))
        taken = (False, accepted > 0, accepted > 1, False)
        rows.append((position, accepted + 1, chosen, (0.0, 0.0), *tree, origins, taken))
        position += accepted + 1
    return TracedAnswer(question, 0, tuple(map(int, rng.integers(20, size=position + 1))), stack_steps(rows))


def make_cells() -> list[Cell]:
    rng = np.random.default_rng(0)
    cells = []
    for row, compose, names in (
        ("Math & co / HASS", "single", ("math",)),
        ("Confidence routed / HASS", "route:confidence", ("math", "chat")),
        ("Merged trees / HASS", "merge:concat", ("math", "chat")),
    ):
        for workload in ("gsm8k", "mt_bench"):
            for temperature in (0.0, 1.0):
                answers = tuple(make_answer(rng, f"q{index}", compose) for index in range(4))
                cells.append(
                    Cell(
                        row=row,
                        specialists=names,
                        compose=compose,
                        nodes=4,
                        workload=workload,
                        temperature=temperature,
                        answers=answers,
                        questions={(f"q{index}", 0): f"What is <{index}>?" for index in range(4)},
                        pieces={(a.question_id, 0): tuple(VOCABULARY[t] for t in a.tokens) for a in answers},
                        correct={"q0": True, "q1": False} if workload == "gsm8k" else {},
                        speed=None,
                    )
                )
    return cells


SETTINGS = {"verifier": "tiny", "tree": "4/1/2", "checks": {"x": [{"same_text": True, "same_steps": True}]}}


@pytest.fixture(scope="module")
def results():
    return summarise(make_cells(), SETTINGS)


@pytest.fixture(scope="module")
def workdir(results, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_vocabulary(folder, VOCABULARY)
    Speeds(folder).add([Speed("Merged trees / HASS", "gsm8k", 0.0, 4, 4, 80, 2.0, 80, 4.0)])
    write_report(folder, results, make_cells(), compare_published=True)
    return folder


def test_all_files_are_there_and_reproducible(results, workdir, tmp_path):
    names = {str(path.relative_to(workdir)) for path in workdir.rglob("*") if path.is_file()}
    figures = ("acceptance_by_depth", "entropy", "routing_shares", "speed_up", "tau_by_nodes")
    assert names == {
        "results.json", "table.md", "table.csv", "table.tex", "report.html", "speed.csv", "vocabulary.json",
        *(f"figures/{name}.{suffix}" for name in figures for suffix in ("png", "svg")),
    }  # fmt: skip
    write_vocabulary(tmp_path, VOCABULARY)
    shutil.copy(workdir / "speed.csv", tmp_path)
    write_report(tmp_path, results, make_cells(), compare_published=True)
    for name in names:
        assert (tmp_path / name).read_bytes() == (workdir / name).read_bytes(), name
    assert json.loads((workdir / "results.json").read_text()) == results


def test_markdown_is_laid_out_like_the_papers(results):
    text = markdown(results)
    assert text.count("| acceptance length") == 2 and "Temperature 1" in text
    cell = results["cells"][0]
    low, high = cell["tau_interval"]
    line = next(line for line in text.splitlines() if line.startswith("| Math & co / HASS"))
    assert f"{cell['tau']:.2f} ± {(high - low) / 2:.2f}" in line
    average = (cell["tau"] + results["cells"][2]["tau"]) / 2
    assert [entry.strip() for entry in line.split("|")][-3:-1] == [f"{average:.2f}", "4"]
    assert "1 of 1 answers decoded for real took the same steps" in text
    assert "(5.42)" in markdown(results, compare_published=True) and "(5.42)" not in text


def test_csv_has_a_line_per_cell(results):
    rows = list(csv.DictReader(io.StringIO(comma_separated(results))))
    assert len(rows) == len(results["cells"])
    assert float(rows[0]["tau"]) == results["cells"][0]["tau"]
    assert float(rows[0]["accepted_at_2"]) == results["cells"][0]["acceptance_by_depth"][1]
    assert rows[4]["routing_shares"].startswith("math=") and rows[0]["routing_shares"] == ""


def test_latex_is_escaped_and_marks_the_best(results):
    text = latex(results)
    assert "Math \\& co / HASS" in text and "mt\\_bench" in text
    assert text.count("\\textbf") >= 4 and text.count("\\begin{tabular}") == 2


def test_published_numbers():
    assert published_tau("Merged trees / EAGLE-2", "svamp", 1.0) == 4.93
    assert published_tau("Math", "gsm8k", 0.0) is None
    assert published_tau("Averaged / HASS", "mini_gsm8k", 0.0) is None
    assert published_tau("Averaged / HASS", "gsm8k", 0.5) is None


def test_page_needs_nothing_else_and_is_small(workdir):
    page = (workdir / "report.html").read_text()
    assert 'src="http' not in page and 'href="http' not in page and "@import" not in page
    assert page.count("</script>") == 2  # what answers hold does not end the data
    assert len(page) < 10_000_000


SCRIPT = """
<script>
window.problems = [];
window.addEventListener("error", (event) => window.problems.push(event.message));
</script>
"""
ACTIONS = """
<script>
const found = {};
const table = document.querySelector("table");
const column = () => [...table.tBodies[0].rows].map((row) => Number(row.cells[1].dataset.value));
const click = () => table.querySelectorAll("thead button")[1].click();
click();
found.descending = column();
click();
found.ascending = column();
const pick = (name, value) => {
  const select = document.getElementById("choose-" + name);
  select.value = value;
  select.dispatchEvent(new Event("change"));
};
pick("row", "Confidence routed / HASS");
pick("workload", "mt_bench");
pick("question", "q1");
const tokens = () => [...document.querySelectorAll("#answer .token")];
found.question = document.querySelector("#answer .question").textContent;
found.text = tokens().map((token) => token.textContent).join("");
found.coloured = tokens().filter((token) => token.style.getPropertyValue("--swatch")).length;
tokens()[0].focus();
tokens()[0].dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
found.focused = tokens().indexOf(document.activeElement);
found.step = document.querySelector("#tree p").textContent;
found.nodes = document.querySelectorAll("#tree li").length;
found.accepted = document.querySelectorAll("#tree .accepted").length;
found.wide = document.documentElement.scrollWidth - window.innerWidth;
found.problems = window.problems;
const out = document.createElement("pre");
out.id = "found";
out.textContent = JSON.stringify(found);
document.body.append(out);
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [1200, 390])
def test_page_works_in_a_browser(workdir, tmp_path, width):
    """It opens without errors, a table sorts both ways, the token view shows an answer and, by keyboard, a tree."""
    page = (workdir / "report.html").read_text()
    acted = page.replace("<head>", f"<head>{SCRIPT}", 1).replace("</body>", f"{ACTIONS}</body>", 1)
    (tmp_path / "page.html").write_text(acted)
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},900", "--virtual-time-budget=3000", "--dump-dom", f"file://{tmp_path / 'page.html'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert '<pre id="found">' in done.stdout, done.stderr[-2000:]
    found = json.loads(html.unescape(done.stdout.rpartition('<pre id="found">')[2].partition("</pre>")[0]))
    assert found["problems"] == []
    assert found["descending"] == sorted(found["descending"], reverse=True) and len(found["descending"]) == 3
    assert found["ascending"] == found["descending"][::-1]
    cell = next(cell for cell in make_cells() if (cell.row, cell.workload) == ("Confidence routed / HASS", "mt_bench"))
    answer = cell.answers[1]
    assert found["question"] == "What is <1>?"
    assert found["text"] == "".join(cell.pieces["q1", 0])
    assert found["coloured"] == int(answer.steps.accepted.sum())
    assert found["focused"] == 1
    assert found["step"].startswith(f"Step 1: {answer.steps.committed[0]} token")
    assert "drafted by" in found["step"]
    assert found["nodes"] == 4 and found["accepted"] == int(answer.steps.accepted[0].sum())
    assert found["wide"] <= 0
