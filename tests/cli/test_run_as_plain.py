"""``narrowcast run X`` against ``python X``: what the script finds, says and leaves is the same."""

import os
import signal
import sys
from pathlib import Path

import pytest

LOOK = '''\
# -*- coding: latin-1 -*-
"""A script that says what world it finds."""
import dataclasses, inspect, json, pickle, sys, threading
import beside

@dataclasses.dataclass
class Kept:
    number: "int" = 3
    word: str = "gr\u00fc\u00df"

main = sys.modules["__main__"]
names = ["__annotations__", "__doc__", "__file__", "__name__", "__package__", "__cached__"]
print(json.dumps({
    **{name: vars(main)[name] for name in names},
    "names": sorted(vars(main)),
    "spec": __spec__ and [__spec__.name, __spec__.parent, __spec__.origin],
    "loader": type(__loader__).__name__,
    "builtins": __builtins__.__name__,
    "argv": sys.argv,
    "path": sys.path[:2],
    "main is this": vars(main) is globals(),
    "pickled": pickle.loads(pickle.dumps(Kept(4))).word,
    "source": inspect.getsource(Kept),
    "beside": beside.__file__,
    "hooks are Python's": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
    "line": input(),
    "rest": sys.stdin.read(),
}, indent=1, ensure_ascii=False))
assert __name__ == "__main__"
'''.encode("latin-1")
# Options that look like ours belong to the script, as does everything else after its name.
ARGUMENTS = (
    "--policy",
    "nonsense",
    "-m",
    "--help",
    "--",
    "",
    "-p=1",
    "two words",
    "gr\u00fc\u00df",
    "--seed",
)


# One of each kind; the others are long, since each starts two processes.
FAST = ("look.py", "errors in a chain")


@pytest.fixture
def world(workshop):
    """One program as a script, a module, a package, and behind a link."""
    for place in ("", "folder/", "package/"):
        workshop.write(f"{place}beside.py", "")
    workshop.write("look.py", LOOK)
    workshop.write("package/__init__.py", "print('the package is imported')")
    workshop.write("package/module.py", LOOK)
    workshop.write("package/without_init/module.py", LOOK)
    workshop.write("package/inner/__init__.py", "from .. import beside")
    workshop.write("package/inner/__main__.py", LOOK.replace(b"import beside", b"from .. import beside"))
    (workshop.folder / "folder/link.py").symlink_to(workshop.folder / "look.py")
    return workshop


WAYS = (
    "look.py",
    "folder/link.py",
    "-m package.module",
    "-m package.without_init.module",
    "-m package.inner",
)


@pytest.mark.parametrize(
    "words",
    [pytest.param(way.split(), id=way, marks=[pytest.mark.long] * (way not in FAST)) for way in WAYS],
)
def test_a_script_finds_the_world_of_a_plain_run(world, words):
    plain, ours = world.both(*words, *ARGUMENTS, stdin="a line\nthe\nrest")
    assert plain.code == 0, plain.stderr
    note = f"--policy went to {words[-1]}; before the name of the script it would be for narrowcast"
    assert (ours.code, ours.stdout) == (0, plain.stdout)
    assert ours.stderr == f"narrowcast: note: {note}\n"
    assert len(ours.captures) == 1
    assert ours.capture.start["argv"][1:] == list(ARGUMENTS)


@pytest.mark.long
def test_the_installed_command_and_safe_path(world):
    """What stands at ``sys.path[0]`` differs: the folder of the command, the current one, nothing."""
    command = Path(sys.executable).with_name("narrowcast")
    if not command.exists():
        # Run from a source tree: what an installer writes for [project.scripts].
        entry = "import sys\nfrom narrowcast.cli import main\nsys.exit(main())\n"
        command = world.write("bin/narrowcast", f"#!{sys.executable}\n{entry}")
        command.chmod(0o755)
    plain = world.python("look.py", *ARGUMENTS)
    installed = world.end(world.start(command, "run", "look.py", *ARGUMENTS))
    assert plain.code == 1
    assert "EOFError" in plain.stderr
    note, _, rest = installed.stderr.partition("\n")
    assert "--policy went to look.py" in note
    assert (installed.code, rest) == (plain.code, plain.stderr)
    world.write("safe.py", "import sys; print(sys.path, __file__)")
    safely = world.python("-P", "safe.py")
    ours = world.python("-P", "-m", "narrowcast", "run", "safe.py")
    assert (ours.code, ours.stdout) == (0, safely.stdout)


ENDINGS = {
    "exit code": "import sys; print('before'); sys.exit(3)",
    "exit message": "import sys; sys.exit('what is wrong: gr\u00fc\u00df')",
    "os._exit": "import os; print('said', flush=True); os._exit(5)",
    "unicode": "print('gr\u00fc\u00df \u2713 \U0001f600'); import sys; print('\u2713', file=sys.stderr)",
    "errors in a chain": """\
        def inner():
            raise KeyError("first")
        def outer():
            try:
                inner()
            except KeyError as error:
                raise ExceptionGroup("several", [ValueError("a"), TypeError("b")]) from error
        if __name__ == "__main__":
            outer()
        """,
    "a hook of its own": """\
        import sys, traceback
        def hook(kind, error, trace):
            print("caught", kind.__name__, [f.name for f in traceback.extract_tb(trace)])
        sys.excepthook = hook
        def fails():
            1 / 0
        fails()
        """,
    "a thread that fails": """\
        import threading
        def fails():
            raise RuntimeError("in a thread")
        thread = threading.Thread(target=fails)
        thread.start()
        thread.join()
        print("goes on")
        """,
    "a thread that outlives an error": """\
        import threading, time, atexit, sys
        @atexit.register
        def last():
            print("at exit", sys.modules["__main__"].__name__, flush=True)
        def lives():
            while main.is_alive():
                time.sleep(0.01)
            print("the thread ends", flush=True)
        main = threading.current_thread()
        threading.Thread(target=lives).start()
        raise ValueError("the main thread ends")
        """,
    "no streams": "import sys; print('last'); sys.stdout.flush(); sys.stderr.close(); sys.stdout.close()",
}


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[pytest.mark.long] * (how not in FAST)) for how in ENDINGS]
)
def test_a_script_ends_as_it_does_in_a_plain_run(workshop, how):
    workshop.write("ends.py", ENDINGS[how])
    plain, ours = workshop.both("ends.py")
    assert (ours.code, ours.stdout, ours.stderr) == (plain.code, plain.stdout, plain.stderr)
    said_nothing = how in ("os._exit", "no streams")
    assert len(ours.captures) == (0 if said_nothing else 1)
    if not said_nothing and 0 <= plain.code < 128:
        assert ours.capture.end["exit_code"] == plain.code


@pytest.mark.long
def test_errors_while_a_package_is_imported_are_the_scripts(workshop):
    """What a package raises as it is imported is neither wrong use nor narrowcast's."""
    workshop.write("package/__init__.py", "def fails():\n    raise RuntimeError('not today')\n\nfails()\n")
    workshop.write("package/module.py", "")
    plain, ours = workshop.both("-m", "package.module")
    without_runpy = [line for line in plain.stderr.splitlines() if "<frozen runpy>" not in line]
    assert (ours.code, ours.stderr.splitlines()) == (plain.code, without_runpy)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_it_as_it_ends_a_plain_run(workshop, number):
    workshop.write(
        "waits.py",
        """\
        import signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
        def wait():
            print("ready", flush=True)
            signal.raise_signal(int(sys.argv[1]))
        wait()
        """,
    )
    plain, ours = workshop.both("waits.py", str(int(number)))
    assert (ours.code, ours.stdout, ours.stderr) == (plain.code, plain.stdout, plain.stderr)
    assert (plain.code, plain.stdout) == (-number, "ready\n")
    assert len(ours.captures) == (1 if number == signal.SIGINT else 0)


FAILING_NETWORK = """\
    import sys
    import torch

    class Fails(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if sys.argv[1] == "forward":
                raise ValueError("in forward")
            return y

    def hook(module, grad_input, grad_output):
        raise ValueError("in a hook of backward")

    network = torch.nn.Sequential(Fails(2, 2), torch.nn.Linear(2, 1))
    network[0].register_full_backward_hook(hook)
    network(torch.ones(1, 2, requires_grad=True)).sum().backward()
    """


@pytest.mark.long
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_inside_a_module_is_shown_as_in_a_plain_run(workshop, where):
    workshop.write("fails.py", FAILING_NETWORK)
    plain, ours = workshop.both("fails.py", where, options=["--policy", "bf16"])

    def frames_of_the_script(text):
        """Lines but those of torch's frames, each of two lines, the notes of narrowcast, and markers."""
        lines = [line for line in text.splitlines() if not line.startswith("narrowcast: note: ")]
        of_torch = {n + more for n, line in enumerate(lines) if "site-packages" in line for more in (0, 1)}
        return [line for n, line in enumerate(lines) if n not in of_torch and "^" not in line]

    assert plain.code == ours.code == ours.capture.end["exit_code"] == 1
    assert os.sep + "narrowcast" + os.sep not in ours.stderr
    assert frames_of_the_script(ours.stderr) == frames_of_the_script(plain.stderr)
