"""Files that a script changes are copied aside before, and put back after."""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from attached_scripts import Runs

from narrowcast.errors import FileError
from narrowcast.scripts import (
    OUTPUTS,
    _files,
    bring_back,
    locked_journal,
    only_run_in_folder,
    restore_files,
    restore_killed,
    set_aside,
)

MADE_IF_MISSING = "os.makedirs('sub', exist_ok=True)\n"
NOT_REMOVED = "with suppress(OSError): os.rmdir('sub')\n"
# By another program, whose file is not seen.
MADE_AGAIN = MADE_IF_MISSING + "shutil.rmtree('sub'); os.mkdir('sub'); os.system('echo x > sub/a')\n"
RENAMED = "os.rename('sub', 'a'); os.mkdir('sub')"
NEW = "os.mkdir('new'); open('new/in', 'w').write('x'); "
# What a script does to the user's files ``kept``, ``sub/in``, ``data/in``, and ``link`` to ``kept``.
WAYS = {
    "open": "open('kept', 'w').write('x')",
    "open, to append": "open(b'kept', 'ab').write(b'x')",
    "open, to update": "open(Path('sub/in'), 'r+').write('x')",
    "os.open": "fd = os.open('kept', os.O_WRONLY | os.O_TRUNC); os.write(fd, b'x'); os.close(fd)",
    "os.truncate": "os.truncate('link', 2); os.truncate(os.open('sub/in', os.O_WRONLY), 1)",
    "through a link": "open('link', 'w').write('x')",
    "from another folder": "os.chdir('sub'); open('../kept', 'w').write('x')",
    "os.replace": "open('a', 'w').write('x'); os.replace('a', 'kept')",
    "renamed away": "os.rename('kept', 'a'); open('a', 'a').write('x')",
    "a folder renamed away": "os.rename('sub', 'a'); open('a/in', 'w').write('x')",
    "a folder made if missing, and renamed": MADE_IF_MISSING + RENAMED,
    "a folder that rmdir leaves, and renamed": NOT_REMOVED + RENAMED,
    "a folder made again, and renamed": MADE_AGAIN + RENAMED,
    "a folder replaced": "shutil.rmtree('sub'); os.makedirs('sub/new'); open('sub/new/a', 'w').write('x')",
    "a new folder renamed": "os.mkdir('new'); open('new/in', 'w').write('x'); os.rename('new/', 'moved/')",
    "a folder in place of a file": "os.remove('kept'); os.mkdir('kept'); open('kept/a', 'w').write('x')",
    "a folder replaced by a link": "shutil.rmtree('sub'); os.symlink('data', 'sub')",
    "a folder replaced by a link to a new one": "shutil.rmtree('sub'); " + NEW + "os.symlink('new', 'sub')",
    "a link moved on": "os.remove('link'); os.symlink('sub', 'link')",
    "a hard link": "os.link('kept', 'a'); open('a', 'w').write('x')",
    "sqlite3": "with sqlite3.connect('a') as db: db.execute('create table t (a)')\ndb.close()",
    "sqlite3, by a URI": "sqlite3.connect('file:%61?mode=rwc', uri=True).execute('create table t (a)')",
    "torch.save": "torch.save([1.0], 'kept')",
    "torch.save, not ASCII": "torch.save([1.0], 'gr\u00fc\u00df'); os.rename('gr\u00fc\u00df', 'kept')",
    "torch.jit.save": "torch.jit.save(torch.jit.script(net), 'kept')",
    "torch.distributed.checkpoint": "dcp.save({'a': torch.ones(2)}, checkpoint_id='sub', no_dist=True)",
    "safetensors": "from safetensors.torch import save_file as save; save(net.state_dict(), 'kept')",
    "safetensors, by name": "import safetensors.numpy as s; s.save_file({}, filename=Path('kept'))",
}  # fmt: skip
# Those after which ``sub`` is no folder.
WITHOUT_SUB = (
    "a folder renamed away",
    "a folder replaced by a link",
    "a folder replaced by a link to a new one",
)
HEAD = """\
import json, os, shutil, sqlite3, sys, warnings
from contextlib import suppress
from pathlib import Path
import torch, torch.distributed.checkpoint as dcp
warnings.simplefilter("ignore")
torch.set_num_threads(1)
net = torch.nn.Linear(2, 2)
codes = {}
for number, (way, text) in enumerate(json.loads(Path(sys.argv[1]).read_text()).items()):
    # Each in a folder and a process of its own, as quick as a fork is.
    if os.fork() == 0:
        os.chdir(str(number))
        exec(text)
        os._exit(0)
    codes[way] = os.waitstatus_to_exitcode(os.wait()[1])
print(json.dumps(codes))
"""


def state(folder):
    """Every name in a folder, with its content, permissions and time."""
    found = {}
    for path in sorted(folder.rglob("*")):
        content = os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()
        about = path.lstat() if content is not False and not path.is_symlink() else None
        found[str(path.relative_to(folder))] = (content, about and (about.st_mode, about.st_mtime_ns))
    return found


def prepare(folder):
    (folder / "sub").mkdir(parents=True)
    (folder / "data").mkdir()
    for name, text in ("kept", "of the user"), ("sub/in", "too"), ("data/in", "other"):
        (folder / name).write_text(text)
        os.utime(folder / name, (1e9, 1e9))
    (folder / "kept").chmod(0o640)
    (folder / "link").symlink_to("kept")


@pytest.fixture(scope="module")
def states(tmp_path_factory, fork_server):
    """Of each way: before, after the script, and restored; and the outputs."""
    runs = Runs(fork_server, tmp_path_factory.mktemp("files"))
    (ways := runs.work.parent / "ways.json").write_text(json.dumps(WAYS))
    for number, _ in enumerate(WAYS):
        prepare(runs.work / str(number))
    before = state(runs.work)
    ended = runs.run(HEAD, str(ways), watched=True)
    assert (ended.code, json.loads(ended.lines[-1])) == (0, dict.fromkeys(WAYS, 0)), ended.stderr
    after = state(runs.work)
    assert set_aside(ended.folder) == "the script replaces or removes a folder (sub)"
    assert state(runs.work) == after
    # With a folder there, the run can make way.
    removed = [runs.work / str(list(WAYS).index(way)) / "sub" for way in WITHOUT_SUB]
    links = {path: os.readlink(path) for path in removed if path.is_symlink()}
    for path in removed:
        path.unlink(missing_ok=True)
        path.mkdir()
    assert set_aside(ended.folder) is None
    aside = state(runs.work)
    bring_back(ended.folder)
    for path in removed:
        path.rmdir()
    for path, target in links.items():
        path.symlink_to(target)
    back = state(runs.work)
    restore_files(ended.folder)
    states = {"before": before, "after": after, "aside": aside, "back": back, "restored": state(runs.work)}
    return states | {"outputs": ended.folder / OUTPUTS}


@pytest.mark.parametrize("way", WAYS)
def test_files_are_as_before(states, way):
    start = f"{list(WAYS).index(way)}/"
    before, after, aside, back, restored = (
        {name: found for name, found in states[when].items() if name.startswith(start)}
        for when in ("before", "after", "aside", "back", "restored")
    )
    assert after != before
    assert aside == restored == before
    assert back == after
    new = {name for name, found in after.items() if found[0] and before.get(name, [0])[0] != found[0]}
    outputs = states["outputs"]
    assert all((outputs / name).is_symlink() or (outputs / name).is_file() for name in new)


def test_locks_caches_and_unchanged_files_stay(runs):
    """Locks, caches and the run's own folder; a file that nothing changed keeps its place too."""
    prepare(runs.work)
    inode = (runs.work / "kept").stat().st_ino
    text = """
        import os, sys, tempfile
        tempfile.TemporaryFile(dir=".").close()
        open("kept", "r+").close()
        os.makedirs("sub", exist_ok=True)
        os.mkfifo("pipe"); os.open("pipe", os.O_RDWR)
        open("/dev/null", "w").write("x")
        os.makedirs(os.environ["XDG_CACHE_HOME"] + "/a")
        for path in os.environ["XDG_CACHE_HOME"] + "/a/b", sys.argv[1] + "/own", "x.lock", "made.pyc":
            open(path, "w").write("x")
        """
    folder = runs.work.parent / "run-1"
    ended = runs.run(text, str(folder), watched=True)
    assert (ended.code, ended.stderr) == (0, "")
    assert restore_files(folder) == []
    assert (runs.work / "kept").stat().st_ino == inode
    stays = [folder / "own", *(runs.work / name for name in ("x.lock", "made.pyc"))]
    assert all(path.read_text() == "x" for path in [*stays, runs.work.parent / "cache/a/b"])
    assert not (folder / OUTPUTS).exists()


def test_children_by_fork_spawn_and_loaders_are_seen(runs, monkeypatch):
    text = """
        import multiprocessing
        from torch.utils.data import DataLoader, Dataset

        class Writes(Dataset):
            def __len__(self):
                return 1
            def __getitem__(self, n):
                open("loader", "w").write("x")
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
    monkeypatch.setenv("HF_HOME", str(runs.work.parent))  # a cache that holds all of somebody's work
    files = [runs.work / name for name in ("loader", "fork", "spawn")]
    for file in files:
        file.write_text("of the user")
    ended = runs.run(text, watched=True)
    assert (ended.code, ended.stderr) == (0, "")
    assert {str(file) for file in files} <= set(restore_files(ended.folder))
    assert [file.read_text() for file in files] == ["of the user"] * 3
    assert (ended.folder / OUTPUTS / "loader").read_text() == "x"


def test_a_file_that_cannot_be_copied_is_not_opened(runs):
    (runs.work / "kept").write_text("of the user")
    journal = runs.work.parent / "run-1" / "files.jsonl"
    ended = runs.run("import os, sys\nos.remove(sys.argv[1])\nopen('kept', 'w')", str(journal), watched=True)
    assert ended.code == 1
    assert f"narrowcast cannot copy it to {journal.parent} (No such file" in ended.stderr
    assert (runs.work / "kept").read_text() == "of the user"


def test_restoring_that_is_cut_short_goes_on(runs, monkeypatch):
    for name in "first", "second":
        (runs.work / name).write_text(name)
    script = "open('second', 'w').write('x'); open('first', 'w').write('x'); open('new', 'w').write('x')"
    folder = runs.run(script, watched=True).folder
    cache = folder / "cache"
    cache.mkdir()
    (cache / "runs").symlink_to(folder.parent)
    with (folder / "files.jsonl").open("a") as journal:
        journal.write('{"path": "/cut sho')
    move = shutil.move

    def interrupt(source, to):
        if Path(to) == runs.work / "second":
            raise KeyboardInterrupt
        move(source, to)

    monkeypatch.setattr(shutil, "move", interrupt)
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(cache))
    with locked_journal(folder), only_run_in_folder(pytest.fail):
        restore_killed(pytest.fail)  # the run goes on
        with pytest.raises(KeyboardInterrupt):
            restore_files(folder)
    monkeypatch.undo()
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(cache))
    restore_killed(lambda _: None)
    assert [(runs.work / name).read_text() for name in ("first", "second")] == ["first", "second"]
    assert {path.name for path in (folder / OUTPUTS).iterdir()} == {"first", "second", "new"}
    assert not (folder / "files.jsonl").exists()


# What a run writes, keeps open, removes and links.
CHANGES = """
    import os
    open("log", "a").write("of the run")
    open("kept", "r+").write("X")
    os.remove("gone"); os.symlink("kept", "link")
    os.mkdir("new"); open("new/in", "w").write("of the run")
    """


class Killed(BaseException):
    pass


class KillAt:
    """Lets the first changes of the disk happen, and no other."""

    def __init__(self, number):
        self.left = number

    def before(self, change):
        def changed(*places):
            self.left -= 1
            if self.left < 0:
                raise Killed
            return change(*places)

        return changed


@pytest.mark.parametrize("way", [set_aside, bring_back])
@pytest.mark.parametrize("changes", range(6))
def test_a_kill_while_files_are_exchanged_loses_none(runs, monkeypatch, way, changes):
    """After any number of renames, the files of the user and those of the run are where they belong."""
    for name in "kept", "gone":
        (runs.work / name).write_text("of the user")
    (runs.work / "link").symlink_to("gone")
    (runs.work / "script.py").write_text("")
    before = state(runs.work)
    folder = runs.run(CHANGES.replace("os.symlink", "os.remove('link'); os.symlink"), watched=True).folder
    if way is bring_back:
        assert set_aside(folder) is None
    kill = KillAt(changes)
    with monkeypatch.context() as inside:
        for owner, name in ((os, "rename"), (os, "unlink"), (os, "symlink"), (shutil, "move")):
            inside.setattr(owner, name, kill.before(getattr(owner, name)))
        with pytest.raises(Killed):
            way(folder)
    restore_files(folder)
    (runs.work / "script.py").write_text("")
    found = state(runs.work)
    assert [found.pop("script.py")[0], before.pop("script.py")[0]] == [b"", b""]
    assert found == before
    outputs = {str(path.relative_to(folder / OUTPUTS)) for path in (folder / OUTPUTS).rglob("*")}
    assert outputs == {"kept", "log", "link", "new", "new/in"}
    assert {path.name for path in folder.iterdir()} == {
        "capture.jsonl",
        "at_end",
        "narrowcast-outputs",
        "stdout.txt",
        "stderr.txt",
    }


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_runs_that_were_killed_are_restored_in_any_order(runs, order):
    """One had made way; what is in the places of its files then is the other one's."""
    for name in "kept", "gone":
        (runs.work / name).write_text("of the user")
    (runs.work / "script.py").write_text("")
    before = state(runs.work)
    folders = [runs.run(CHANGES, watched=True).folder]
    assert set_aside(folders[0]) is None
    folders.append(runs.run(CHANGES.replace("of the run", "of the other run"), watched=True).folder)
    for which in order:
        restore_files(folders[which])
    after = state(runs.work)
    assert after.keys() == before.keys()
    assert all(after[name] == before[name] for name in ("kept", "gone"))
    logs = [(folder / OUTPUTS / "log").read_text() for folder in folders]
    assert logs == ["of the run", "of the other run"]


def test_open_files_follow_a_run_that_makes_way(runs):
    """They are renamed, not copied: here of this process, which has the run's log open."""
    folder = runs.run("open('log', 'w').write('a'); open('kept', 'w')", watched=True).folder
    (log,) = [runs.work / "log"]
    with log.open("a") as file:
        inode = log.stat().st_ino
        assert set_aside(folder) is None
        log.write_text("of another run")
        file.write("b")
        log.unlink()
    bring_back(folder)
    assert (log.read_text(), log.stat().st_ino) == ("ab", inode)


def test_files_that_cannot_be_renamed_stay(runs, monkeypatch):
    for name in "first", "second":
        (runs.work / name).write_text("of the user")
    folder = runs.run("open('first', 'w').write('x'); open('second', 'w').write('x')", watched=True).folder
    after = state(runs.work)
    rename = os.rename

    def refuse(source, to):
        if os.path.basename(source) == "second":
            raise OSError(18, "Invalid cross-device link")
        rename(source, to)

    with monkeypatch.context() as inside:
        inside.setattr(os, "rename", refuse)
        why = set_aside(folder)
    assert why == "the script changes a file that cannot be renamed (second: Invalid cross-device link)"
    assert state(runs.work) == after
    assert set(restore_files(folder)) == {str(runs.work / name) for name in ("first", "second")}
    assert [(runs.work / name).read_text() for name in ("first", "second")] == ["of the user"] * 2


def test_a_copy_is_made_again_if_another_run_had_its_turn(tmp_path, monkeypatch):
    """It stood still in the middle of the copy, and the other run has written to the same file."""
    file, copy, turns = tmp_path / "file", tmp_path / "copy", []
    file.write_text("of the user")
    copy2 = shutil.copy2

    def slow_copy(source, to, **options):
        if not turns:
            turns.append(os.rename(file, tmp_path / "of the other run"))
            (tmp_path / "of the other run").write_text("spoiled")
            file.write_text("of the user")
            copy2(tmp_path / "of the other run", to, **options)
        else:
            copy2(source, to, **options)

    monkeypatch.setattr(shutil, "copy2", slow_copy)
    _files._copy(str(file), str(copy))
    assert copy.read_text() == "of the user"


def test_copies_stay_on_the_file_system_of_the_file(tmp_path, monkeypatch):
    """In the folder of the run, or hidden where the script does not look."""
    work, run = tmp_path / "disk/me/project/out", tmp_path / "home/run"
    work.mkdir(parents=True)
    run.mkdir(parents=True)
    ways = [str(work / "new/file"), str(run), ".hidden"]
    assert _files.place_of_copies(*ways) == str(run / "narrowcast-originals")
    monkeypatch.setattr(_files, "_device_of", lambda folder: folder.startswith(str(tmp_path / "disk")))
    assert _files.place_of_copies(*ways) == str(tmp_path / "disk/.hidden")
    monkeypatch.setattr(os, "access", lambda folder, _: str(folder).endswith("out"))
    assert _files.place_of_copies(*ways) == str(work / ".hidden")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert _files.place_of_copies(*ways) == str(run / "narrowcast-originals")


def test_runs_in_one_folder_wait_for_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path))
    said, order = [], []

    def second():
        with only_run_in_folder(said.append):
            order.append("second")

    with only_run_in_folder(pytest.fail):
        for name, value in ("RANK", "1"), ("NARROWCAST_RUN_DIR", "x"):
            with monkeypatch.context() as inside:
                inside.setenv(name, value)
                with only_run_in_folder(pytest.fail):
                    pass
        (other := threading.Thread(target=second)).start()
        while not said:
            time.sleep(0.01)
        order.append("first")
    other.join()
    assert order == ["first", "second"]
    assert set(said) == {"waiting for another run in this folder to end"}


def test_a_file_that_cannot_be_put_back_is_named(runs, monkeypatch):
    (runs.work / "kept").write_text("of the user")
    folder = runs.run("open('kept', 'w').write('x')", watched=True).folder

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "move", refuse)
    with pytest.raises(
        FileError, match=rf"cannot put {runs.work}/kept back .*: Permission denied\. Its content"
    ):
        restore_files(folder)
    monkeypatch.undo()
    assert restore_files(folder) == [str(runs.work / "kept")]
    assert (runs.work / "kept").read_text() == "of the user"


def test_outputs_moved_before_are_never_deleted(tmp_path):
    """A folder of the same name may be all that is left of one whose move was killed."""
    for number in range(3):
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / str(number)).write_text("x")
        _files._move(str(tmp_path / "sub"), str(tmp_path / "sub"), tmp_path / "outputs", str(tmp_path))
    files = [path for path in (tmp_path / "outputs").rglob("*") if path.is_file()]
    assert sorted(path.name for path in files) == ["0", "1", "2"]
