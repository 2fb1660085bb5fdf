"""Which files a script writes, and that a run ends if it reads a file that an earlier run wrote."""

import json

import pytest
from attached_scripts import Runs

from narrowcast.attach import READ_OF_AN_EARLIER_RUN, FilesSeen, read_files

# How a script writes ``kept`` and how it reads it again.
WAYS = {
    "open": ("open('kept', 'w').write('x')", "open('kept').read()"),
    "open, w+": ("open('kept', 'w+').write('x')", "open('kept', 'r+').read()"),
    "os.open": (
        "fd = os.open('kept', os.O_WRONLY | os.O_CREAT); os.write(fd, b'x'); os.close(fd)",
        "os.read(os.open('kept', os.O_RDONLY), 9)",
    ),
    "another folder": (
        "os.makedirs('sub', exist_ok=True); os.chdir('sub'); open('../kept', 'w').write('x')",
        "os.chdir('sub'); open(os.path.join('..', 'kept')).read()",
    ),
    "os.replace": ("open('a', 'w').write('x'); os.replace('a', 'kept')", "open('kept').read()"),
    "a folder that is renamed": (
        "os.mkdir('new'); open('new/in', 'w').write('x'); os.rename('new', 'kept')", "open('kept/in').read()",
    ),
    "torch.save": ("torch.save([1.0], 'kept')", "torch.load('kept')"),
    "torch.save, a name that is not ASCII": (
        "torch.save([1.0], 'gr\u00fc\u00df'); os.rename('gr\u00fc\u00df', 'kept')", "torch.load('kept')",
    ),
    "torch.distributed.checkpoint": (
        "dcp.save({'a': torch.ones(2)}, checkpoint_id='folder', no_dist=True)",
        "dcp.load({'a': torch.ones(2)}, checkpoint_id='folder', no_dist=True)",
    ),
}  # fmt: skip
HEAD = """\
import json, os, sys, warnings
from pathlib import Path
import torch, torch.distributed.checkpoint as dcp
warnings.simplefilter("ignore")
torch.set_num_threads(1)
net = torch.nn.Linear(2, 2)
ways = json.loads(Path(sys.argv[1]).read_text())
codes = {}
for number, way in enumerate(ways):
    # Each in a folder and a process of its own, as quick as a fork is.
    if os.fork() == 0:
        os.makedirs(str(number), exist_ok=True)
        os.chdir(str(number))
        for text in ways[way]:
            exec(text)
        os._exit(0)
    codes[way] = os.waitstatus_to_exitcode(os.wait()[1])
print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory, fork_server):
    """Run every way in one script: it writes, and another run reads."""
    runs = Runs(fork_server, tmp_path_factory.mktemp("files"))
    ways = runs.work.parent / "ways.json"

    def run(texts, earlier):
        ways.write_text(json.dumps(texts))
        ended = runs.run(HEAD, str(ways), earlier=earlier)
        assert ended.code == 0, ended.stderr
        return json.loads(ended.lines[-1]), ended

    def files_of(ended):
        """Way -> what was written in its folder."""
        found = {way: [] for way in WAYS}
        for file in ended.files.written:
            number, _, name = file.removeprefix(f"{runs.work}/").partition("/")
            list(found.values())[int(number)].append(name)
        return found

    wrote, first = run({way: [write] for way, (write, _) in WAYS.items()}, {})
    earlier = {
        f"{runs.work}/{number}/{name}": way
        for number, (way, names) in enumerate(files_of(first).items())
        for name in names
    }
    read, second = run({way: [read] for way, (_, read) in WAYS.items()}, earlier)
    lines = [json.loads(line) for line in (second.folder / "files.jsonl").read_text().splitlines()]
    return {
        "wrote": (wrote, files_of(first)),
        "read": (read, {line["run"]: line["read"] for line in lines if "read" in line}),
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_is_written_is_seen(seen, way):
    codes, files = seen["wrote"]
    assert codes[way] == 0
    expected = "folder/.metadata" if way == "torch.distributed.checkpoint" else "kept"
    assert expected in files[way]


@pytest.mark.parametrize("way", WAYS)
def test_a_process_that_reads_an_earlier_runs_file_is_ended(seen, way):
    codes, files = seen["read"]
    assert codes[way] == READ_OF_AN_EARLIER_RUN
    assert files[way].rpartition("/")[2] in ("kept", "in", ".metadata")


HARMLESS = {
    "a file that is gone": "os.remove('kept')\ntry: open('kept')\nexcept OSError: pass",
    "to append": "open('kept', 'a').write('x')",
    "what this run wrote": "open('kept').read(); os.rename('kept', 'moved'); open('moved').read()",
    "a file that is empty": "open('kept', 'w').close(); open('empty').read()",
    "a lock": "os.open('x.lock', os.O_RDWR)",
    "a folder": "os.listdir('.'); os.open('.', os.O_RDONLY)",
    "a pipe": "os.mkfifo('pipe'); os.open('pipe', os.O_RDWR)",
    "devices": "open('/dev/null').read(); open('/dev/null', 'w').write('x'); open('/proc/self/stat').read()",
    "in the run's own folder": "open(sys.argv[1] + '/own').read()",
    "in a cache": "open(os.environ['XDG_CACHE_HOME'] + '/a/b').read()",
}


def test_what_ends_no_process(runs):
    made = """
        import os, sys, tempfile
        from pathlib import Path
        # Linux opens such a file by its folder; if that counted, every file in it would be refused.
        tempfile.TemporaryFile(dir='.').close()
        open('kept', 'w').write('x'); open('empty', 'w').close(); open('x.lock', 'w').write('x')
        Path('made.py').write_text('')
        os.makedirs(os.environ['XDG_CACHE_HOME'] + '/a')
        open(os.environ['XDG_CACHE_HOME'] + '/a/b', 'w').write('x')
        open(sys.argv[1] + '/own', 'w').write('x')
        """
    folder = str(runs.work.parent / "run-1")
    first = runs.run(made, folder, earlier={})
    assert first.code == 0, first.stderr
    made = ["kept", "empty", "made.py"]
    assert [file.removeprefix(f"{runs.work}/") for file in first.files.written] == made
    earlier = dict.fromkeys(first.files.written, "it")
    steps = [f"print({how!r}, flush=True)\n{text}" for how, text in HARMLESS.items()]
    second = runs.run(
        "import os, sys\nfrom pathlib import Path\n" + "\n".join(steps), folder, earlier=earlier
    )
    assert (second.code, second.lines, second.stderr) == (0, list(HARMLESS), "")


def test_children_by_fork_spawn_and_loaders_are_seen(runs):
    text = """
        import multiprocessing
        from torch.utils.data import DataLoader, Dataset

        class Writes(Dataset):
            def __len__(self):
                return 2
            def __getitem__(self, n):
                open(f"loader-{n}", "w").write("x")
                return n

        def work(name):
            open(name, "w").write("x")

        if __name__ == "__main__":
            list(DataLoader(Writes(), num_workers=1))
            for start in "fork", "spawn":
                child = multiprocessing.get_context(start).Process(target=work, args=(start,))
                child.start()
                child.join()
                assert child.exitcode == 0
        """
    ended = runs.run(text, earlier={})
    assert (ended.code, ended.stderr) == (0, "")
    names = {file.removeprefix(f"{runs.work}/") for file in ended.files.written}
    assert {"loader-0", "loader-1", "fork", "spawn"} <= names


@pytest.mark.parametrize("start", ["", "fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_a_process_that_reads_an_earlier_runs_file_is_logged(runs, start):
    """The script itself is ended, or the child that reads."""
    text = f"""
        import multiprocessing
        def work():
            open("kept").read()
        if __name__ == "__main__":
            print("before", flush=True)
            if not "{start}":
                work()
            child = multiprocessing.get_context("{start}").Process(target=work)
            child.start()
            child.join()
            print(child.exitcode)
        """
    (runs.work / "kept").write_text("x")
    ended = runs.run(text, earlier={str(runs.work / "kept"): "it"})
    code = READ_OF_AN_EARLIER_RUN
    assert (ended.code, ended.lines) == ((0, ["before", str(code)]) if start else (code, ["before"]))
    assert ended.files.read == (str(runs.work / "kept"), "it")


def test_a_log_is_read_as_far_as_it_goes(tmp_path):
    log = tmp_path / "files.jsonl"
    assert read_files(log) == FilesSeen(written=(), read=None)
    log.write_bytes(b'{"wrote": "/a"}\n{"wrote": "/b"}\n{"wrote": "/a"}\n{"read": "/c", "run": "x"}\n{"wro')
    assert read_files(log) == FilesSeen(written=("/a", "/b"), read=("/c", "x"))
