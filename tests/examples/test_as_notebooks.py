"""Every example opens as a notebook: cell after cell in one namespace, under the arguments of a kernel."""

import json
import os
import re
import sys

import pytest
from example_runs import EXAMPLES

from child_processes import finished

PROGRAMS = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("*/main.py"))
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py")) + PROGRAMS
# They train for many seconds at their default size: every cell runs but the last, which starts the run.
NOT_RUN = {
    "digits.py",
    "gradient_histogram.py",
    "inference.py",
    "loss_scaling.py",
    "quantized_sine.py",
    "segment_recurrence/main.py",
    "speech_style/main.py",
    "train_validate/main.py",
    "transformers_digits.py",
    "transformers_text.py",
}
RUN = [name for name in SCRIPTS if name not in NOT_RUN]
WHOLE = "step_by_step.py"
LAST = re.compile(
    r'if __name__ == "__main__":\n(    #.*\n)*'
    r'    main\(parse_arguments\(\[.*\] if "get_ipython" in globals\(\) else None\)\)\n'
)
BROKEN = 'if __name__ == "__main__":\n    main(parse_arguments())\n'
# What a kernel does: no file of its own, arguments that are not the example's, and a function of IPython's.
# It finds modules that lie beside the notebook; each notebook has its own.
KERNEL = r"""
import json, linecache, os, re, sys, tempfile, traceback, types

results = {}
for name, folder, cells in json.load(sys.stdin):
    sys.path.insert(0, folder)
    sys.argv = ["ipykernel_launcher.py", "-f", "/run/kernel-1.json"]
    notebook = sys.modules["__main__"] = types.ModuleType("__main__")
    notebook.get_ipython = lambda: None
    os.chdir(tempfile.mkdtemp(dir=os.environ["NOTEBOOKS"]))
    results[name] = "ran"
    print(f"==== {name}", flush=True)
    for number, cell in enumerate(cells):
        title = f"<cell {number} of {name}>"
        linecache.cache[title] = (len(cell), None, cell.splitlines(keepends=True), title)
        try:
            exec(compile(cell, title, "exec", dont_inherit=True), vars(notebook))
        except BaseException:
            results[name] = traceback.format_exc()
            break
    sys.path.remove(folder)
    for module, one in list(sys.modules.items()):
        if (getattr(one, "__file__", None) or "").startswith(folder):
            del sys.modules[module]
json.dump(results, open(os.path.join(os.environ["NOTEBOOKS"], "results.json"), "w"))
"""


def cells_of(name):
    """As editors and jupytext cut them: at lines that begin with ``# %%``."""
    return re.split(r"(?m)^# %%.*\n", (EXAMPLES / name).read_text(encoding="utf-8"))


def notebook(name, title=None, *, without_last=False):
    """(title, the folder that it lies in, its cells)"""
    cells = cells_of(name)
    return title or name, str((EXAMPLES / name).parent), cells[:-1] if without_last else cells


def as_notebooks(scripts, folder):
    """What became of each, and what they printed, by name."""
    environment = {k: v for k, v in os.environ.items() if k not in ("NARROWCAST_RUN_DIR", "MPLBACKEND")}
    environment |= {"NOTEBOOKS": str(folder), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = finished([sys.executable, "-W", "error", "-c", KERNEL], given=json.dumps(scripts), env=environment)
    assert done.returncode == 0, done.stderr
    printed = dict(part.split("\n", 1) for part in done.stdout.split("==== ")[1:])
    return json.loads((folder / "results.json").read_text()), printed


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_has_cells(script):
    first, *cells = cells_of(script)
    assert first.startswith('"""')
    assert first.rstrip().endswith('"""'), "the docstring is a cell of its own, and comes first"
    assert len(cells) >= 4
    assert all(cell.strip() for cell in cells)
    assert LAST.fullmatch(cells[-1])


@pytest.fixture(scope="session")
def notebooks(tmp_path_factory):
    """All up to their last cell, one whole, and one that takes the arguments of the kernel for its own."""
    scripts = [notebook(name, without_last=True) for name in SCRIPTS if name != WHOLE]
    title, place, cells = notebook(WHOLE, "broken", without_last=True)
    scripts += [notebook(WHOLE), (title, place, [*cells, BROKEN])]
    return as_notebooks(scripts, tmp_path_factory.mktemp("notebooks"))


def test_every_cell_before_the_last_runs_and_prints_nothing(notebooks):
    results, printed = notebooks
    assert set(NOT_RUN) <= set(SCRIPTS)
    assert {name: results[name] for name in SCRIPTS} == dict.fromkeys(SCRIPTS, "ran")
    assert {name for name in SCRIPTS if printed[name]} == {WHOLE}


def test_arguments_of_a_kernel_are_not_the_examples(notebooks):
    assert "SystemExit: 2" in notebooks[0]["broken"]


@pytest.mark.long
def test_the_quick_ones_run_from_their_first_cell_to_their_last(tmp_path):
    results, printed = as_notebooks([notebook(name) for name in RUN], tmp_path)
    assert results == dict.fromkeys(RUN, "ran")
    assert all(printed[name] for name in RUN)
