"""``python -m narrowcast.apex`` provides the name apex; everything else is as under plain Python."""

import json
import os
import sys

import pytest

import child_processes
from narrowcast.apex.__main__ import main
from narrowcast.apex._stand_in import _INSTEAD, OFFERED

OURS = (sys.executable, "-m", "narrowcast.apex")
PROVIDED = "narrowcast: apex.amp is provided by narrowcast.apex.amp\n"

LOOK = """\
import json, sys, threading

def last(number):
    return 1 / number

if __name__ == "__main__":
    main = sys.modules["__main__"]
    names = ["__annotations__", "__doc__", "__file__", "__name__", "__package__"]
    print(json.dumps({
        **{name: vars(main)[name] for name in names},
        "main is this": vars(main) is globals(),
        "argv": sys.argv,
        "path": sys.path[0],
        "hook is Python's": sys.excepthook is sys.__excepthook__,
        "stdin": sys.stdin.read(),
    }))
    thread = threading.Thread(target=last, args=(0,), name="a thread")
    thread.start()
    thread.join()
    if sys.argv[1] == "exits":
        sys.exit(7)
    last(0)
"""

NAMES = """\
import importlib.util, pickle
from apex import amp
assert amp.initialize and amp.scale_loss
import apex
import apex.amp, apex.amp._amp_state, apex.amp.lists.functional_overrides
import narrowcast.apex as ours
from apex.amp import _amp_state
from apex.amp._amp_state import _amp_state as the_same
from apex.amp.lists.functional_overrides import FP16_FUNCS
from apex.optimizers import FusedAdam
from apex.optimizers.fused_adam import FusedAdam as its_file
from apex.parallel import DistributedDataParallel as DDP, convert_syncbn_model

assert apex is ours and apex.amp is amp is ours.amp
assert _amp_state is the_same is amp._amp_state is ours.amp._amp_state
assert amp.lists.functional_overrides.FP16_FUNCS is FP16_FUNCS
assert its_file is FusedAdam
assert amp.__spec__.name == "narrowcast.apex.amp"
assert pickle.loads(b"capex.optimizers.fused_sgd\\nFusedSGD\\n.") is apex.optimizers.FusedSGD
assert importlib.util.find_spec("apex.amp") is amp.__spec__
for statement in (
    "import apex.normalization",
    "from apex import RNN",
    "from apex.parallel.LARC import LARC",
    "from apex.contrib.xentropy import SoftmaxCrossEntropyLoss",
    "from apex.transformer import parallel_state",
    "from apex.transformer.amp import GradScaler",
    "from apex import fp16_utils",
    "from apex.fp16_utils.loss_scaler import DynamicLossScaler",
    "from apex.multi_tensor_apply import multi_tensor_applier",
    "from narrowcast.apex import fp16_utils",
    "import apex._fused",
    "import apex.amp.nonsense",
):
    try:
        exec(statement)
    except ModuleNotFoundError as error:
        print(error)
"""

SPAWNS = """\
import multiprocessing, sys, threading
import torch
from apex import amp

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        from apex.parallel import DistributedDataParallel
        return index, amp.__name__

def work(queue):
    queue.put(amp.__name__)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    process.join()
    loader = torch.utils.data.DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn")
    names = [name for _, (name,) in loader]
    print([queue.get()], names)
    # The thread of the loader's queue is the last to let go of its locks: where Python ends in the midst of
    # that, multiprocessing tells of a lock that was left behind and is not there.
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join()
"""

# An apex as it is since it lost its amp: what it has is its own, what it lacks is ours.
WITHOUT_AMP = """\
import apex, apex.own
from apex.parallel import DistributedDataParallel
from apex import amp
print(apex.__file__.endswith("site/apex/__init__.py"), apex.own.__name__, amp.__name__)
try:
    import apex.contrib
except ImportError as error:
    print(error)
"""


FILES = {
    "look.py": LOOK,
    "package/__init__.py": "",
    "package/look.py": LOOK,
    "names.py": NAMES,
    "spawns.py": SPAWNS,
    "without_amp.py": WITHOUT_AMP,
    "with_amp.py": "from apex import amp\nprint(amp.__file__)\n",
    "site/apex/__init__.py": "",
    "site/apex/own.py": "",
    "whole/apex/__init__.py": "",
    "whole/apex/amp.py": "",
}


@pytest.fixture(scope="session")
def ended(tmp_path_factory):
    """What each script ended with; all are started at once."""
    folder = tmp_path_factory.mktemp("stand_in")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    python = (sys.executable,)
    commands = {"names": (*OURS, "names.py"), "spawns": (*OURS, "spawns.py")}
    for name, words in (("raises", ("look.py", "raises", "-m")), ("exits", ("-m", "package.look", "exits"))):
        commands |= {name: (*OURS, *words), f"{name} plain": (*python, *words)}
    commands |= {"without amp": (*OURS, "without_amp.py"), "with amp": (*OURS, "with_amp.py")}
    installed = {"without amp": folder / "site", "with amp": folder / "whole"}
    started = {}
    for name, command in commands.items():
        path = os.pathsep.join([str(installed.get(name, folder)), os.environ.get("PYTHONPATH", "")])
        settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        started[name] = child_processes.start(command, cwd=folder, env=settings)
    return {name: child_processes.end(process, "a line") for name, process in started.items()}


@pytest.mark.parametrize(("name", "code"), [("raises", 1), ("exits", 7)])
def test_a_script_runs_and_ends_as_under_plain_python(ended, name, code):
    plain, ours = ended[f"{name} plain"], ended[name]
    assert plain.returncode == ours.returncode == code
    assert json.loads(ours.stdout) == json.loads(plain.stdout)
    assert "division by zero" in plain.stderr
    assert ours.stderr == plain.stderr


def test_every_name_that_scripts_import_is_provided(ended):
    found = ended["names"]
    assert found.returncode == 0, found.stderr
    assert found.stderr == PROVIDED
    known = "apex.amp, apex.optimizers and apex.parallel"
    lines = found.stdout.splitlines()
    names = [
        "normalization", "RNN", "parallel.LARC", "contrib", "transformer", "transformer", "fp16_utils",
        "fp16_utils", "multi_tensor_apply", "fp16_utils", "_fused", "amp.nonsense",
    ]  # fmt: skip
    for line, name in zip(lines, names, strict=True):
        assert line.startswith(f"narrowcast provides {known}, but not apex.{name}"), line
    assert lines[0].endswith(". In place of it: " + _INSTEAD["apex.normalization"])
    assert lines[5].endswith(". In place of it: " + _INSTEAD["apex.transformer"])
    assert lines[-1].endswith("but not apex.amp.nonsense")


def test_spawned_processes_and_loaders_find_apex_too(ended):
    found = ended["spawns"]
    assert found.returncode == 0, found.stderr
    assert found.stderr == PROVIDED
    name = "narrowcast.apex.amp"
    assert found.stdout == f"{[name]} {[name] * 2}\n"


def test_an_installed_apex_keeps_what_it_has(ended):
    found = ended["without amp"]
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[0] == "True apex.own narrowcast.apex.amp"
    assert "but not apex.contrib" in found.stdout.splitlines()[1]
    assert found.stderr == PROVIDED.replace("apex.amp", "apex.parallel")  # the first that is asked for


def test_an_apex_with_an_amp_of_its_own_runs_and_is_named(ended):
    found = ended["with amp"]
    assert found.returncode == 0, found.stderr
    path = found.stdout.strip()
    assert path.endswith("whole/apex/amp.py")
    assert found.stderr == (f"narrowcast: apex with its own amp is installed and runs: {path}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected a script: python -m narrowcast.apex [-m] SCRIPT [ARGS...]"),
        (["-m"], "expected a script: "),
        (["--level", "O1", "train.py"], "unknown option --level: python -m narrowcast.apex"),
        (["missing.py"], "cannot run missing.py: No such file or directory"),
        (["-m", "no_such_module"], "cannot run module no_such_module: no module of that name was found"),
        (["train.ipynb"], "train.ipynb is a notebook, and only scripts can be run unmodified"),
    ],
)
def test_wrong_use_is_one_line_and_2(words, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"narrowcast: {message}")
    assert said.err.count("\n") == 1


def test_help_is_on_stdout(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: python -m narrowcast.apex [-m] SCRIPT [ARGS...]\n")
    assert all(name in said for name in OFFERED)
