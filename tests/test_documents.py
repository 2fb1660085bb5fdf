"""The README and the documents run, and name only what exists."""

import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401 - it sets variables of the environment as it is imported
import torch
import typer
import yaml

import narrowcast as nc
from child_processes import finished, output_of
from narrowcast.cli.main import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def files(path):
    """Scripts that a page tells to write: name -> text."""
    found = re.findall(r'```python title="(.+?)"\n(.*?)```', path.read_text(encoding="utf-8"), re.DOTALL)
    return dict(found)


# Each block as a script of its own, one after the other in one process: importing torch is what takes long.
RUNNER = """
import gc, json, os, sys, tempfile, traceback

outcomes = {}
for name, code in json.load(sys.stdin).items():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
            outcomes[name] = None
        except BaseException:
            outcomes[name] = traceback.format_exc()
        os.chdir("/")
    gc.collect()
with open(sys.argv[1], "w") as file:
    json.dump(outcomes, file)
"""
PYTHON_BLOCKS = {
    f"{path.relative_to(ROOT)}, block {number}": code
    for path in DOCUMENTS
    for number, code in enumerate([*blocks(path, "python"), *files(path).values()])
    if "init_process_group" not in code
}


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory):
    said = tmp_path_factory.mktemp("documents") / "outcomes.json"
    warned = ["-W", "error", "-W", "ignore:Guards may run slower on Python 3.13.0"]
    done = finished([sys.executable, *warned, "-c", RUNNER, said], given=json.dumps(PYTHON_BLOCKS))
    assert done.returncode == 0, done.stderr
    return json.loads(said.read_text())


@pytest.mark.cpu_kind
@pytest.mark.parametrize("name", PYTHON_BLOCKS)
def test_python_blocks_run(name, outcomes):
    assert outcomes[name] is None, outcomes[name]


def test_the_readme_is_short_and_begins_with_commands():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 130
    first_screen = "\n".join(lines[:30])
    assert "make demo" in first_screen
    assert "make test" in first_screen
    assert blocks(ROOT / "README.md", "python")[0].splitlines()[-1] in first_screen


def test_the_readmes_example_runs(tmp_path, fork_server):
    (tmp_path / "train.py").write_text(blocks(ROOT / "README.md", "python")[0], encoding="utf-8")
    # In the format that the README's command takes too: a CPU may emulate bf16.
    words = ["run", "--run-dir", tmp_path / "run", "train.py"]
    done = fork_server.run("narrowcast.cli.main:main", words, folder=tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "loss 0." in done.stdout


@pytest.mark.long
def test_the_readmes_commands_run_its_example(tmp_path):
    (tmp_path / "train.py").write_text(blocks(ROOT / "README.md", "python")[0], encoding="utf-8")
    commands = commands_of(ROOT / "README.md")
    assert [command.split()[1] for command in commands] == ["run", "compare", "doctor"]
    for command in commands:
        program, verb, *rest = command.split()
        folder = [] if verb == "doctor" else ["--run-dir", str(tmp_path / verb)]
        said = run_command(shlex.join([program, verb, *folder, *rest]), tmp_path)
        assert ("bf16" if verb == "doctor" else "loss 0.") in said
    assert (tmp_path / "compare" / "report.html").is_file()


@pytest.mark.cpu_kind
@pytest.mark.parametrize("policy", ["fp16", "bf16"])
def test_the_stepper_of_the_documents_trains_the_digits(policy, capsys):
    (code,) = [block for block in blocks(ROOT / "docs" / "stepper.md", "python") if "load_digits" in block]
    assert 'policy="auto"' in code
    exec(code.replace('policy="auto"', f'policy="{policy}"'), {"__name__": "__main__"})
    accuracy = float(re.search(r"accuracy (\S+),", capsys.readouterr().out)[1])
    assert accuracy > 0.93  # fp32 comes to 0.96


def test_porting_a_loop_changes_no_weight():
    (difference,) = blocks(ROOT / "docs" / "torch-amp.md", "diff")
    lines = difference.splitlines()
    assert sum(line[0] in "+-" for line in lines) == 6
    weights = {}
    for side in "-+":
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        untrained = model.weight.detach().clone()
        scope = {
            "torch": torch,
            "device": "cpu",
            "dtype": torch.bfloat16,
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), 0.5, fused=True),
            "loader": [(torch.randn(16, 8), torch.randn(16, 1)) for _ in range(6)],
            "loss_of": torch.nn.functional.mse_loss,
        }
        exec("\n".join(line[1:] for line in lines if line[0] in f" {side}"), scope)
        weights[side] = model.weight.detach()
        assert not torch.equal(weights[side], untrained)
    assert (weights["-"] - weights["+"]).abs().max() <= 1e-6


COMMANDS = sorted(
    {
        (str(path.relative_to(ROOT)), line.split(" #")[0].strip())
        for path in DOCUMENTS
        for block in blocks(path, "sh")
        for line in block.splitlines()
    }
)


ADVICE = re.findall(r"`(narrowcast [^`]+ train\.py)`", (ROOT / "docs" / "faq.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("document", "command"), [*COMMANDS, *(("docs/faq.md", command) for command in sorted({*ADVICE}))]
)
def test_commands_are_commands(document, command):
    """Its options are those of narrowcast's verbs, its examples and targets exist, its scripts are shown."""
    program, *words = shlex.split(command.removeprefix(".venv/bin/"))
    if program == "torchrun":
        assert words[:2] == ["--nproc-per-node", "2"]
        ours = words[2:4] == ["-m", "narrowcast"]
        program, *words = ["narrowcast", *words[4:]] if ours else ["python", *words[2:]]
    if program == "narrowcast":
        verb, *options = words
        command = typer.main.get_command(app).commands[verb]
        with command.make_context(verb, options) as parsed:
            options = parsed.params.get("arguments") or []
            words = [word for word in (parsed.params.get("script"), *options) if word]
    if program in ("narrowcast", "python") and words and words[0].startswith("examples/"):
        assert (ROOT / words[0]).is_file()
        text = (ROOT / words[0]).read_text(encoding="utf-8")
        assert [word for word in words[1:] if word.startswith("--") and f'"{word}"' not in text] == []
    elif program == "make":
        assert f"\n{words[0]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
    else:
        assert program in ("narrowcast", "python", "python3", "pip", "source", "git", "tensorboard")


def test_a_wrong_command_is_found_out():
    with pytest.raises(typer.exceptions.TyperException):
        test_commands_are_commands("a document", "narrowcast compare --repaets 3 train.py")


def run_command(command, folder):
    """Run a command of a page in a folder, and return what it prints."""
    program, *words = shlex.split(command)
    if words[0] == "doctor":
        words[1:1] = ["--budget-s", "1"]
    module = {"torchrun": "torch.distributed.run"}.get(program, program)
    own = {
        "NARROWCAST_CACHE_DIR": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "PET_STANDALONE": "1",  # torchrun takes a free port then, whoever else uses its usual one
    }
    return output_of([sys.executable, "-m", module, *words], cwd=folder, env=os.environ | own)


def gate():
    """The shell commands of the job in docs/compare.md, but for its installation."""
    (job,) = blocks(ROOT / "docs" / "compare.md", "yaml")
    (steps,) = [one["steps"] for one in yaml.safe_load(job)["jobs"].values()]
    return {step["name"]: step["run"] for step in steps if "run" in step and step["name"] != "Install"}


def run_gate(script, folder):
    """Run the job as GitHub does, and return the exit code of each step, and what it summarizes."""
    (folder / "train.py").write_text(script, encoding="utf-8")
    programs = folder / "bin"
    programs.mkdir()
    for name, words in {"narrowcast": "-m narrowcast", "python": ""}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        (programs / name).chmod(0o755)
    own = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "GITHUB_STEP_SUMMARY": str(folder / "summary"),
        "NARROWCAST_CACHE_DIR": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    codes = {}
    for name, commands in gate().items():
        shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", commands]
        codes[name] = finished(shell, cwd=folder, env=os.environ | own).returncode
    summary = folder / "summary"
    return codes, summary.read_text() if summary.exists() else ""


def documented_fields():
    """The paths of the table of fields in docs/compare.md."""
    text = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
    table = text.partition("The fields of the JSON to build on:")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE)
    return [field for row in rows for field in re.findall(r"`([\w.]+)`", row)]


@pytest.mark.long
def test_the_gate_to_paste_runs_and_its_fields_are_there(tmp_path):
    codes, summary = run_gate(blocks(ROOT / "README.md", "python")[0], tmp_path)
    assert codes == {"Compare": 0, "Summary": 0}
    assert summary.startswith("right: yes\nworth it: ")
    assert (tmp_path / "comparison" / "report.html").is_file()
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert len(documented_fields()) > 30
    for field in documented_fields():
        value = found
        for name in field.split("."):
            value = value[name]
        assert value is not None or found["reasons"][field]
    assert found["loss"]["site"].endswith("train.py:11")


@pytest.mark.long
def test_the_gate_to_paste_fails_where_mixed_precision_is_wrong(tmp_path):
    """As in an implementation of mixed precision that loses the gradients of a layer."""
    script = """
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)

    def forward(self, x):
        hidden = self.first(x)
        if hidden.dtype is not torch.float32:
            hidden = hidden.detach()
        return self.last(hidden.relu())


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100):
    x = torch.randn(16, 8)
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    codes, summary = run_gate(script, tmp_path)
    assert codes == {"Compare": 1, "Summary": 0}
    assert summary.startswith("right: no: gradients: ")
    # With "safe" where that computes in bf16, else explain.
    assert "\ntype next: narrowcast " in summary


@pytest.mark.long
def test_the_gate_to_paste_fails_where_the_script_does(tmp_path):
    codes, summary = run_gate("raise SystemExit(5)", tmp_path)
    assert (codes, summary) == ({"Compare": 3, "Summary": 0}, "")


@pytest.mark.long
@pytest.mark.parametrize(
    ("document", "command", "says"),
    [
        ("docs/several-gpus.md", "torchrun --nproc-per-node 2 train_ddp.py", "4 steps on 2 ranks, loss 0."),
        ("docs/index.md", "narrowcast run train.py", "loss 0.0"),
    ],
)
def test_what_a_page_shows_runs_by_its_command(document, command, says, tmp_path):
    assert (document, command) in COMMANDS
    for name, text in files(ROOT / document).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert says in run_command(command, tmp_path)


def commands_of(page):
    """Those of narrowcast for a script of the reader's, each once, in the order of the page."""
    lines = [line.split(" #")[0].strip() for block in blocks(page, "sh") for line in block.splitlines()]
    return [one for one in dict.fromkeys(lines) if one.startswith("narrowcast ") and "examples/" not in one]


@pytest.mark.long
@pytest.mark.parametrize("page", ["doctor", "explain", "policies", "run"])
def test_commands_of_a_page_run_one_after_the_other(page, tmp_path):
    script = files(ROOT / "docs" / "index.md")["train.py"].replace("range(50)", "range(120)")
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/train.py"):
        (tmp_path / name).write_text(script, encoding="utf-8")
    (tmp_path / "policy.toml").write_text(
        blocks(ROOT / "docs" / "policy-file.md", "toml")[1], encoding="utf-8"
    )
    commands = commands_of(ROOT / "docs" / f"{page}.md")
    assert commands
    if "narrowcast report out" in commands:
        commands.insert(0, "narrowcast run --policy bf16 --run-dir out train.py")
    for command in commands:
        run_command(command, tmp_path)


TOML_BLOCKS = {
    f"{path.relative_to(ROOT)}, block {number}": text
    for path in DOCUMENTS
    for number, text in enumerate(blocks(path, "toml"))
}


@pytest.mark.parametrize("name", TOML_BLOCKS)
def test_toml_blocks_are_policies(name, tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(TOML_BLOCKS[name], encoding="utf-8")
    policy = nc.Policy.load(path)
    assert len(policy.rules) >= TOML_BLOCKS[name].count("[[rule]]") > 0


def test_every_example_is_listed_run_and_shown():
    gallery = runpy.run_path(str(ROOT / "docs" / "make_gallery.py"))
    run_by_make = gallery["commands"]()
    for path in (ROOT / "examples").iterdir():
        if path.suffix == ".py" or any(path.glob("*.py")):
            assert any(name.split("/")[0] == path.stem for name in run_by_make), path
    for name, command in run_by_make.items():
        assert f"examples/{name}.py" in command
        assert f"`examples/{name}.py`" in (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8"), name
    for picture in (ROOT / "docs" / "gallery").glob("*.png"):
        assert picture.stat().st_size < 400_000, picture
        assert f"(gallery/{picture.name})" in (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")


def test_make_examples_runs_an_example_and_says_which_failed(tmp_path, capsys):
    gallery = runpy.run_path(str(ROOT / "docs" / "make_gallery.py"))
    (tmp_path / "made").mkdir()
    gallery["run"].__globals__.update(GALLERY=tmp_path / "made", WRITTEN=tmp_path / "written")
    draws = "import os; open(os.environ['NARROWCAST_RUN_DIR'] + '/drawn.png', 'w').close(); print('done')"
    assert gallery["run"]("good", ["python", "-c", draws])
    assert not gallery["run"]("bad", ["python", "-c", "raise SystemExit('it broke')"])
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["drawn.png"]
    good, bad = capsys.readouterr().out.splitlines()
    assert good.endswith("done")
    assert bad.endswith("FAILED  it broke")
    assert gallery["main"](["sine"]) == 2


def test_files_and_make_targets_that_documents_name_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for path in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]:
        text = path.read_text(encoding="utf-8")
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", prose):
            assert (path.parent / target).exists(), f"{path.name} points at {target}"
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
        assert named <= targets, f"{path.name}: {named - targets}"


@pytest.mark.parametrize(("page", "fewest"), [("deviations", 15), ("from-apex", 15), ("supported", 10)])
def test_every_difference_names_a_test_that_exists(page, fewest):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    rows = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    assert len(rows) > fewest
    for file, name in rows:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{name}"
