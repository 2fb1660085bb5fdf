"""``narrowcast migrate`` on the command line."""

import json
import os
import re
import stat
import sys
from pathlib import Path

import pytest

from child_processes import finished
from narrowcast.cli import main
from narrowcast.migrate import diff_of, migrate_file
from narrowcast.migrate.source._edits import Changes, Edit

OLD = "import torch\nscaler = torch.cuda.amp.GradScaler()\n"
NEW = 'import torch\nscaler = torch.amp.GradScaler("cuda")\n'


@pytest.fixture
def narrowcast(capfd, monkeypatch):
    """The command in this process: most of the time goes into starting one."""

    def call(*words, cwd, columns="10000"):
        monkeypatch.setenv("COLUMNS", columns)
        with monkeypatch.context() as there:
            there.chdir(cwd)
            code = main(["migrate", *map(str, words)])
        return code, *capfd.readouterr()

    return call


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(OLD)
    return tmp_path


def test_a_diff_by_default_without_torch(folder):
    code = (
        "import sys\nfrom narrowcast.cli import main\ncode = main(sys.argv[1:])\n"
        "sys.exit(9 if 'torch' in sys.modules else code)"
    )
    settings = {k: v for k, v in os.environ.items() if not k.startswith("NARROWCAST_")} | {"COLUMNS": "10000"}
    done = finished([sys.executable, "-c", code, "migrate", "train.py"], cwd=folder, env=settings)
    assert done.returncode == 0
    assert done.stdout == (
        "--- train.py\n+++ train.py\n@@ -1,2 +1,2 @@\n import torch\n-scaler = torch.cuda.amp.GradScaler()\n"
        '+scaler = torch.amp.GradScaler("cuda")\n'
    )
    told = "narrowcast: train.py:2: deprecated-amp: changed: torch.cuda.amp.GradScaler is deprecated"
    assert told in done.stderr
    assert done.stderr.endswith(
        "rule             changed  left alone\ndeprecated-amp         1           0\n1 file, 1 to change\n"
    )
    assert (folder / "train.py").read_text() == OLD


def test_a_diff_in_color_has_the_same_lines(folder):
    (folder / "train.py").write_text("import os\n" + OLD)
    outcome = migrate_file(folder / "train.py", "torch")
    colored = diff_of(outcome, color=True)
    assert re.sub(r"\x1b\[\d*m", "", colored) == diff_of(outcome)
    assert "\n import os\n" in colored
    assert "\n\x1b[31m-scaler" in colored


def test_write_then_nothing_is_left_to_do(folder, narrowcast):
    assert narrowcast("--write", ".", cwd=folder)[:2] == (0, "train.py\n")
    assert (folder / "train.py").read_text() == NEW
    assert os.listdir(folder) == ["train.py"]
    assert narrowcast("--write", ".", cwd=folder)[:2] == (0, "")
    assert narrowcast("--check", ".", cwd=folder)[0] == 0


def test_check_exits_1_and_lists_files_to_change(folder, narrowcast):
    (folder / "good.py").write_text(NEW)
    assert narrowcast("--check", ".", cwd=folder)[:2] == (1, "train.py\n")
    assert (folder / "train.py").read_text() == OLD


def test_json_holds_findings_and_diff_of_each_file(folder, narrowcast):
    (folder / "broken.py").write_text("from apex import amp\ndef (\n")
    (folder / "other.py").write_text("x = 1\n")
    code, out, _ = narrowcast("--json", ".", cwd=folder)
    found = json.loads(out)
    assert code == 3
    assert (found["schema"], found["target"], found["files_looked_at"]) == (1, "torch", 3)
    broken, train = found["files"]
    assert broken["path"] == "broken.py"
    assert broken["problem"].startswith("does not parse: ")
    assert train["changes"] is True
    assert train["diff"].startswith("--- train.py\n")
    assert train["findings"] == [
        {
            "path": "train.py",
            "line": 2,
            "column": 10,
            "rule": "deprecated-amp",
            "message": "torch.cuda.amp.GradScaler is deprecated: torch.amp.GradScaler with 'cuda'",
            "fixed": True,
        }
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"from apex import amp\ndef (\n", "broken.py: does not parse: "),
        (b"def f(:\n", "broken.py: does not parse: "),
        (b"from apex import amp\nx = '\xff'\n", "broken.py: cannot be decoded: "),
        (
            b"# -*- coding: klingon -*-\nfrom apex import amp\n",
            "broken.py: cannot be decoded: unknown encoding",
        ),
        (b"from apex import amp\nx = '\0'\n", "broken.py: does not parse: "),
        (b"amp = " + b"(" * 5000 + b")" * 5000, "broken.py: does not parse: "),
    ],
)
def test_a_file_that_cannot_be_parsed_is_reported(folder, narrowcast, content, words):
    (folder / "broken.py").write_bytes(content)
    code, out, err = narrowcast("--write", ".", cwd=folder)
    assert (code, out) == (3, "train.py\n")
    assert words in err
    assert "2 files, 1 changed, 1 not looked at" in err
    assert (folder / "broken.py").read_bytes() == content
    assert (folder / "train.py").read_text() == NEW


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (None, "KeyError('none such')"),
        ("def (", "RuntimeError('broken.py: the migrated text does not parse;"),
    ],
)
def test_a_bug_in_a_stage_is_reported(folder, narrowcast, monkeypatch, made, told):
    from narrowcast.migrate import _migration

    def stage(source, target):
        if source.path != "broken.py":
            return renamed(source, target)
        if made is None:
            raise KeyError("none such")
        return Changes(edits=[Edit(0, 0, made)])

    renamed = _migration.deprecated_names
    monkeypatch.setattr(_migration, "_STAGES", (stage,))
    (folder / "broken.py").write_text(OLD)
    code, out, err = narrowcast("--write", ".", cwd=folder)
    assert (code, out) == (3, "train.py\n")
    assert f"broken.py: narrowcast failed on it, please report: {told}" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing"], "expected files and folders, and missing does not exist"),
        (["train.ipynb"], "train.ipynb is a notebook, and only Python files can be migrated: "
         "write its cells to one (jupyter nbconvert --to script train.ipynb), and migrate that"),
        (["train.py", "--write", "--check"], "one of them at a time"),
        (["train.py", "--to", "jax"], "Invalid value for '--to': 'jax' is not one of 'torch', 'narrowcast'"),
        (["-"], "expected files and folders, got -: to see a diff of stdin, give /dev/stdin"),
        ([], "Missing argument"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_sentence_and_2(folder, narrowcast, words, message):
    (folder / "train.ipynb").write_text("{}")
    code, out, err = narrowcast(*words, cwd=folder)
    assert (code, out) == (2, "")
    assert message in err
    assert (folder / "train.py").read_text() == OLD


def test_a_file_that_cannot_be_written_is_2_and_stays(folder, narrowcast, monkeypatch):
    def no(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", no)  # root may write everywhere
    code, _, err = narrowcast("--write", "train.py", cwd=folder)
    assert code == 2
    assert "cannot write train.py: Permission denied" in err
    assert os.listdir(folder) == ["train.py"]
    assert (folder / "train.py").read_text() == OLD


def test_encoding_mark_mode_and_link_stay(folder, narrowcast):
    path = folder / "train.py"
    lines = "# -*- coding: latin-1 -*-\r\n# gr\u00fcn\nimport torch\r\nscaler = torch.cuda.amp.GradScaler()"
    path.write_bytes(lines.encode("latin-1"))
    path.chmod(0o754)
    (folder / "mark.py").write_bytes(b"\xef\xbb\xbf" + OLD.encode())
    assert narrowcast("--write", "mark.py", cwd=folder)[0] == 0
    assert (folder / "mark.py").read_bytes() == b"\xef\xbb\xbf" + NEW.encode()
    (folder / "link.py").symlink_to(path)
    assert narrowcast("--write", "link.py", cwd=folder)[0] == 0
    assert path.read_bytes() == lines.replace("cuda.amp.GradScaler()", 'amp.GradScaler("cuda")').encode(
        "latin-1"
    )
    assert stat.S_IMODE(path.stat().st_mode) == 0o754
    assert (folder / "link.py").is_symlink()


def test_a_read_only_file_stays_and_others_are_written(folder, narrowcast):
    (folder / "a.py").write_text(OLD)
    (folder / "a.py").chmod(0o444)
    code, out, err = narrowcast("--write", ".", cwd=folder)
    assert (code, out) == (2, "train.py\n")
    assert "cannot write a.py: it is read-only" in err
    assert "2 files, 1 changed, 1 not written\n" in err
    (folder / "train.py").write_text(OLD)
    files = json.loads(narrowcast("--json", "--write", ".", cwd=folder)[1])["files"]
    assert {one["path"]: one["written"] for one in files} == {"a.py": False, "train.py": True}
    assert (folder / "a.py").read_text() == OLD
    assert (folder / "train.py").read_text() == NEW


def test_links_and_pipes_in_a_folder_are_skipped(folder, narrowcast):
    """Editors lock a file by a link that leads nowhere, and reading a pipe would wait."""
    (folder / ".#train.py").symlink_to("someone@somewhere.1")
    (folder / "link.py").symlink_to("train.py")
    os.mkfifo(folder / "pipe.py")
    assert narrowcast("--check", ".", cwd=folder)[:2] == (1, "train.py\n")
    assert narrowcast("--check", "link.py", cwd=folder)[:2] == (1, "link.py\n")


def test_a_file_that_only_uses_a_scaler_is_read(folder, narrowcast):
    (folder / "train.py").write_text(
        "def step(loss, scaler, optimizer, parameters):\n    scaler.scale(loss).backward()\n"
        "    torch.nn.utils.clip_grad_norm_(parameters, 1.0)\n    scaler.step(optimizer)\n"
        "    scaler.update()\nimport torch\n"
    )
    assert "clip-before-unscale" in narrowcast("train.py", cwd=folder)[2]


def test_folders_of_versions_and_environments_are_passed_over(folder, narrowcast):
    for name in (".git", ".venv", "__pycache__", "deep/node_modules", "deep/er"):
        (folder / name).mkdir(parents=True)
        (folder / name / "train.py").write_text(OLD)
    (folder / "notes.txt").write_text(OLD)
    (folder / "env").mkdir()
    (folder / "env" / "pyvenv.cfg").write_text("")
    (folder / "env" / "activate_this.py").write_text(OLD)
    assert narrowcast("--check", ".", cwd=folder)[1] == "train.py\ndeep/er/train.py\n"
    assert narrowcast("--check", ".venv", cwd=folder)[1] == ".venv/train.py\n"


def test_a_folder_without_a_python_file_is_said(tmp_path, narrowcast):
    for name in ("none", "some"):
        (tmp_path / name).mkdir()
    (tmp_path / "some" / "train.py").write_text(OLD)
    code, out, err = narrowcast("none", "some", cwd=tmp_path)
    assert (code, err.count("no Python file in")) == (0, 1)
    assert "narrowcast: no Python file in none\n" in err
    assert "-scaler = " in out


def test_notebooks_in_a_folder_that_use_amp_are_named(folder, narrowcast):
    """The first three of them; one that was named itself is refused."""
    (folder / "plots.ipynb").write_text('{"cells": [{"source": ["import torch\\n"]}]}')
    for number in range(5):
        (folder / f"nb{number}.ipynb").write_text('{"cells": [{"source": ["from apex import amp\\n"]}]}')
        err = narrowcast("--check", ".", ".", cwd=folder)[2]
        if number == 0:
            assert "narrowcast: 1 notebook not looked at: nb0.ipynb\n" in err
    assert "narrowcast: 5 notebooks not looked at: nb0.ipynb, nb1.ipynb, nb2.ipynb, and 2 more\n" in err
    told = json.loads(narrowcast("--json", ".", cwd=folder)[1])
    assert told["notebooks_not_looked_at"] == [f"nb{number}.ipynb" for number in range(5)]


def test_tables_and_lines_fit_eighty_columns(folder, narrowcast):
    (folder / "train.py").write_text("from torch.cuda.amp import autocast\nx = autocast\n")
    _, _, err = narrowcast("train.py", cwd=folder, columns="80")
    assert err.count("left alone") == 2
    assert max(map(len, err.splitlines())) <= 80


def test_git_applies_a_diff_without_a_last_line_end(folder, narrowcast):
    (folder / "train.py").write_text(OLD.rstrip("\n"))
    out = narrowcast("train.py", cwd=folder)[1]
    assert out.count("\\ No newline at end of file\n") == 2
    patched = finished(["git", "apply", "-"], given=out.encode(), cwd=folder, text=False)
    assert patched.returncode == 0, patched.stderr
    assert (folder / "train.py").read_text() == NEW.rstrip("\n")


def test_a_file_given_twice_is_migrated_once(folder, narrowcast):
    (folder / "link.py").symlink_to("train.py")
    paths = ["train.py", ".", "./train.py", folder / "train.py", "link.py"]
    _, out, err = narrowcast("--check", *paths, cwd=folder)
    assert out == "train.py\n"
    assert "1 file, 1 to change" in err
    assert Path(folder / "train.py").read_text() == OLD
