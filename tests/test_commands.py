"""The commands as a user runs them: they work end to end, and bad input gives one line and a status that is not 0."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny_hf import WORDS, write_tiny_verifier

ROOT = Path(__file__).resolve().parent.parent


def run(module: str, *flags: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    command = [sys.executable, "-m", module, *flags]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def fails(module: str, *flags: str) -> str:
    """The one line a failing command prints."""
    done = run(module, *flags)
    lines = [line for line in done.stderr.splitlines() if line.strip() and "it/s]" not in line]  # without progress bars
    assert done.returncode == 1, done.stderr
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    return lines[0]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """A tiny verifier, questions, and conversations to train on."""
    folder = tmp_path_factory.mktemp("work")
    write_tiny_verifier(folder / "verifier")
    questions = [{"question_id": n, "turns": [" ".join(WORDS[n : n + 5]), WORDS[n]]} for n in range(4)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    messages = lambda n: [
        {"role": "user", "content": " ".join(WORDS[n : n + 4])},
        {"role": "assistant", "content": " ".join(WORDS[n : n + 8])},
    ]
    rows = "".join(json.dumps({"messages": messages(n)}) + "\n" for n in range(10))
    (folder / "conversations.jsonl").write_text(rows)
    return folder


@pytest.fixture(scope="module")
def trained(workspace) -> Path:
    """The working folder of a short training run with the tiny verifier."""
    done = run("taps_jax.train", *train_flags(workspace, steps=3))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"drafter written to {workspace / 'run' / 'drafter'}\n")
    return workspace / "run"


def train_flags(workspace: Path, steps: int) -> list[str]:
    return [
        "--config=configs/smollm2.py",
        f"--workdir={workspace / 'run'}",
        f"--config.verifier={workspace / 'verifier'}",
        f"--config.data.conversations=('{workspace / 'conversations.jsonl'}',)",
        "--config.data.batch_size=4",
        "--config.data.draft_vocabulary=20",
        "--config.log_every=1",
        f"--config.total_steps={steps}",
    ]


def test_training_logs_and_resumes(workspace, trained):
    log = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == [1, 2, 3]
    assert all(len(row["agreement"]) == 3 and row["tokens_per_second"] > 0 for row in log)
    again = run("taps_jax.train", *train_flags(workspace, steps=3))
    assert "already trained for 3 steps" in again.stdout and not again.stderr
    assert "trained with another seed" in fails("taps_jax.train", *train_flags(workspace, 3), "--config.seed=5")


def test_an_interrupted_run_ends_with_the_same_drafter(workspace, trained):
    """The config stops after two steps, a second command goes on to three."""
    workdir = workspace / "resumed"
    for steps in (2, 3):
        done = run("taps_jax.train", *train_flags(workspace, steps), f"--workdir={workdir}")
        assert done.returncode == 0, done.stderr
    for name in ("model.safetensors", "draft_vocab.safetensors", "config.json"):
        assert (workdir / "drafter" / name).read_bytes() == (trained / "drafter" / name).read_bytes()
    assert [json.loads(line)["step"] for line in (workdir / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_evaluation_reports_lossless_answers(workspace, trained, batch_size):
    done = run(
        "taps_jax.eval",
        f"--verifier={workspace / 'verifier'}",
        f"--drafter={trained / 'drafter'}",
        f"--questions={workspace / 'questions.jsonl'}",
        "--max_new_tokens=12",
        f"--batch_size={batch_size}",
        "--tree=5/1/2",
    )
    assert done.returncode == 0, done.stderr
    assert "trees of 5 nodes, depth 1, top_k 2; 5 nodes verified per step" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("| questions "))
    assert "acceptance length" in row
    answers, identical = done.stdout.splitlines()[-1].removeprefix("lossless: ").split()[0].split("/")
    assert answers == identical and int(answers) >= 4


def test_two_drafters_are_composed(workspace, trained):
    common = [
        f"--verifier={workspace / 'verifier'}",
        f"--drafter=one={trained / 'drafter'}",
        f"--drafter=two={trained / 'drafter'}",
        "--tree=5/1/2",
    ]
    questions = [f"--questions={workspace / 'questions.jsonl'}", "--max_new_tokens=12", "--num_questions=2"]
    done = run("taps_jax.eval", *common, *questions, "--compose=merge:concat")
    assert done.returncode == 0, done.stderr
    assert "merge:concat(one+two), trees of 5 nodes, depth 1, top_k 2; 9 nodes verified per step" in done.stdout
    done = run("taps_jax.generate", *common, "--prompt=w1 w2", "--max_new_tokens=8", "--show_origin")
    assert done.returncode == 0, done.stderr
    assert " one " in done.stderr and " two " in done.stderr and "acceptance length" in done.stderr


def table_command(workspace: Path, trained: Path, workdir: Path) -> list[str]:
    questions = workspace / "table"
    questions.mkdir(exist_ok=True)
    for name in ("gsm8k", "mine"):
        rows = [{"question_id": n, "turns": [" ".join(WORDS[n : n + 3])]} for n in range(6)]
        (questions / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "--config=configs/table.py:smollm2",
        f"--config.verifier={workspace / 'verifier'}",
        "--config.tree=5/1/2",
        "--config.max_new_tokens=8",
        "--config.rows=(('Math', 'single', ('math',)), ('Joined', 'merge:trie', ('math', 'chat')))",
        *(f"--drafter={name}={trained / 'drafter'}" for name in ("math", "chat")),
        "--workloads=gsm8k,mine",
        "--temperatures=0,1",
        f"--data_dir={questions}",
        f"--workdir={workdir}",
    ]


@pytest.mark.slow
def test_a_table_is_filled_and_a_killed_run_goes_on_to_the_same_table(workspace, trained, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = run("taps_jax.eval", *table_command(workspace, trained, whole))
    assert done.returncode == 0, done.stderr
    assert "| Joined" in done.stdout and done.stdout.splitlines()[-1] == str(whole)
    assert "replayed; 16 of 16 answers" in done.stdout.lower()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "taps_jax.eval", *table_command(workspace, trained, killed)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(killed.glob("traces/*/*")):  # killed as the first traces appear
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert not (killed / "table.csv").exists()
    assert run("taps_jax.eval", *table_command(workspace, trained, killed)).returncode == 0
    for name in ("table.csv", "table.md", "table.tex", "results.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    expected = (whole / "report.html").read_bytes()
    (whole / "report.html").unlink()
    assert run("taps_jax.report", f"--workdir={whole}").returncode == 0
    assert (whole / "report.html").read_bytes() == expected


@pytest.mark.slow
def test_a_sweep_between_equal_drafters_is_flat(workspace, trained, tmp_path):
    flags = [
        flag for flag in table_command(workspace, trained, tmp_path) if flag.startswith(("--drafter", "--data_dir"))
    ]
    flags += [f"--verifier={workspace / 'verifier'}", "--workloads=mine", "--weights=0.5", "--tree=5/1/2"]
    done = run("taps_jax.sweep", *flags, "--max_new_tokens=8", f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    header, *rows = (line.split(",") for line in (tmp_path / "averaging_sweep.csv").read_text().splitlines())
    assert [row[:4] for row in rows] == [["math", "chat", weight, "mine"] for weight in ("0.0", "0.5", "1.0")]
    assert len({row[header.index("tau")] for row in rows}) == 1
    assert (tmp_path / "figures" / "averaging_sweep.svg").exists()
    assert "between 0 and 1" in fails("taps_jax.sweep", *flags, "--weights=1.5")


def test_bad_tables_give_one_line(workspace, trained, tmp_path):
    flags = table_command(workspace, trained, tmp_path / "run")
    assert "give either --questions" in fails("taps_jax.eval", "--verifier=smollm2")
    assert "no svamp.jsonl" in fails("taps_jax.eval", *flags, "--workloads=svamp")
    assert "--temperatures holds 'x'" in fails("taps_jax.eval", *flags, "--temperatures=0,x")
    assert "grid.json: cannot be read" in fails("taps_jax.report", f"--workdir={tmp_path}")
    assert not (tmp_path / "run").exists()


def test_answers_are_rewritten_identically(workspace):
    flags = [f"--verifier={workspace / 'verifier'}", f"--questions={workspace / 'questions.jsonl'}"]
    answers = workspace / "answers.jsonl"
    done = run("taps_jax.regenerate", *flags, f"--output={answers}", "--max_new_tokens=8")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [row["id"] for row in rows] == [0, 1, 2, 3]
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)
    assert all(len(row["messages"]) == 4 or not row["complete"] for row in rows)
    done = run("taps_jax.regenerate", *flags, f"--compare={answers}", "--max_new_tokens=8", "--num_questions=3")
    assert done.stdout == f"answers: 3/3 identical to {answers}\n"


def test_bad_names_and_files_give_one_line(workspace, trained, tmp_path):
    drafter, questions = f"--drafter={trained / 'drafter'}", f"--questions={workspace / 'questions.jsonl'}"
    verifier = f"--verifier={workspace / 'verifier'}"
    assert "'no/such' is not 'smollm2', a GGUF file or a directory" in fails(
        "taps_jax.eval", "--verifier=no/such", drafter, questions
    )
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question_id": 1, "turns": ["a"]}\n{"question_id": 2, "turns": "b"}\n')
    assert "broken.jsonl, line 2: turns is 'b'" in fails("taps_jax.eval", verifier, drafter, f"--questions={broken}")
    other = write_tiny_verifier(tmp_path / "other", hidden_size=64)
    assert "has hidden_size 32" in fails("taps_jax.eval", f"--verifier={other}", drafter, questions)
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"question_id": 1, "turns": ["w1 " * 300]}) + "\n")
    assert "max_position_embeddings of 256" in fails("taps_jax.eval", verifier, drafter, f"--questions={long}")
    for tree, message in {
        "--total_token=1": "total_token must be at least 2",
        "--tree=big": "--tree is 'big', expected auto or three numbers such as 60/5/10",
        "--tree=auto --depth=2": "give either --tree or",
    }.items():
        assert message in fails("taps_jax.eval", verifier, drafter, questions, *tree.split())
    assert "expected one of decode" in fails("taps_jax.benchmark", "dekode")


def test_bad_settings_give_one_line(workspace):
    flags = train_flags(workspace, steps=3)
    assert 'Did you mean "passes"' in fails("taps_jax.train", *flags, "--config.objective.pases=2")
    assert "features.source is 'magic'" in fails(
        "taps_jax.train", *flags, f"--workdir={workspace / 'other'}", "--config.features.source=magic"
    )
    assert "data.batch_size 4 must be a multiple" in fails(
        "taps_jax.train", *flags, f"--workdir={workspace / 'other'}", "--config.data.accumulate=3"
    )
    no_data = [flag for flag in flags if "conversations" not in flag]
    assert "data.conversations is empty" in fails("taps_jax.train", *no_data, "--config.data.conversations=()")
    assert "--workdir" in fails("taps_jax.train", "--config=configs/smollm2.py")
    assert "configs/none.py" in fails("taps_jax.train", "--config=configs/none.py", "--workdir=x")


def test_paper_configurations_load():
    """Values of the paper that a change of defaults must not touch."""
    for name, passes, warmup, schedule in (("hass", 3, 404, 40_375), ("eagle2", 1, 500, 200_000)):
        namespace: dict = {}
        exec((ROOT / "configs" / f"{name}.py").read_text(), namespace)
        config = namespace["get_config"]()
        assert config.objective.passes == passes and config.objective.topk_weight == (1.0 if passes == 3 else 0.0)
        assert (config.optimizer.warmup_steps, config.optimizer.schedule_steps) == (warmup, schedule)
        assert (config.optimizer.learning_rate, config.data.batch_size, config.optimizer.clip_value) == (3e-5, 32, 0.5)
