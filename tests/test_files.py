"""The atomic write that every package uses."""

import errno
import os
import signal
import stat
import subprocess
import sys

import pytest

from narrowcast._files import replacing


def replace_with(path, content=b"new"):
    with replacing(path) as file:
        file.write(content)


@pytest.mark.parametrize("name", ["file", "日" * 80])
def test_content_is_replaced_at_the_end_of_the_block(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_content(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail():
        with replacing(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_links_and_permissions_stay(tmp_path):
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"old")
    path.chmod(0o640)
    link.symlink_to(path)
    replace_with(link)
    assert link.is_symlink()
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_what_a_killed_writer_left_is_removed(tmp_path):
    path = tmp_path / "file"
    code = f"""
import os, signal, sys
sys.path[:] = {sys.path!r}
from narrowcast._files import replacing
with replacing({str(path)!r}) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert not path.exists()
    assert len(os.listdir(tmp_path)) == 1
    replace_with(path)
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_that_is_about_to_be_renamed_is_not_abandoned(tmp_path, monkeypatch):
    path = tmp_path / "file"
    rename = os.replace

    def another_writer_first(*names):
        monkeypatch.setattr(os, "replace", rename)
        replace_with(path, b"another")
        rename(*names)

    monkeypatch.setattr(os, "replace", another_writer_first)
    replace_with(path)
    assert path.read_bytes() == b"new"


def test_two_writers_at_once_both_finish(tmp_path):
    path = tmp_path / "file"
    with replacing(path) as outer:
        outer.write(b"outer")
        replace_with(path, b"inner")
    assert path.read_bytes() == b"outer"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_system_without_locks_can_be_written(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", no_locks)
    replace_with(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_system_that_syncs_no_folders_can_be_written(tmp_path, monkeypatch):
    sync = os.fsync

    def only_files(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    replace_with(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_pipe_is_written_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        replace_with(pipe)
        assert stat.S_ISFIFO(pipe.stat().st_mode)
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)
