"""Where a run leaves what it leaves."""

import errno
import os
import re
from pathlib import Path

import pytest

from narrowcast.capture import discard_captures, make_run_folder
from narrowcast.errors import FileError

ADVICE = "choose another with --run-dir, or set NARROWCAST_CACHE_DIR"


def test_the_folder_that_was_asked_for_is_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = make_run_folder("train", asked=Path("a/b"))
    assert made == tmp_path / "a/b"
    assert made.is_dir()
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path / "unused"))
    assert make_run_folder("train", asked=made) == made
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]
    assert list(made.iterdir()) == []


def test_a_new_folder_says_what_ran_and_when(tmp_path, monkeypatch):
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path))
    made = make_run_folder("train")
    assert made.parent == tmp_path / "runs"
    assert re.fullmatch(rf"train-\d{{8}}-\d{{6}}-{os.getpid()}", made.name)
    longest = make_run_folder("\U0001f600" * 300)
    assert longest.is_dir()


def test_without_a_word_it_is_the_home_folder_or_a_temporary_one(tmp_path, monkeypatch):
    monkeypatch.delenv("NARROWCAST_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert make_run_folder("train").parent == tmp_path / ".cache/narrowcast/runs"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = make_run_folder("train")
    assert made.parent == tmp_path
    assert made.name.startswith("narrowcast-train-")


@pytest.mark.parametrize(("asked", "why"), [("file/x", "Not a directory"), (".", "Read-only file system")])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch, asked, why):
    def refuse(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError) as refused:
        make_run_folder("train", asked=tmp_path / asked)
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path / "file"))
    assert str(refused.value) == f"cannot write in the folder {tmp_path / asked}: {why}; {ADVICE}"
    with pytest.raises(FileError, match=r"cannot write in the folder .*file/runs/train-.*: Not a directory"):
        make_run_folder("train")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_cache_that_is_read_only_or_full_stops_nothing(tmp_path, monkeypatch, code):
    mkdir, said = Path.mkdir, []

    def refuse(path, *args, **kwargs):
        if "cache" in path.parts:
            raise OSError(code, os.strerror(code))
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path / "cache"))
    made = make_run_folder("train", tell=said.append)
    assert made.is_dir()
    why = os.strerror(code)
    where = f"NARROWCAST_CACHE_DIR, {tmp_path / 'cache'}"
    assert said == [f"cannot write in {where}: {why}; using {made} instead"]
    assert made.parent == tmp_path


@pytest.mark.parametrize(
    ("from_rank", "stays"),
    [
        (0, {"capture-rankx.jsonl", "other.txt"}),
        # ``report`` would show the comparison and its page in place of this run's.
        (2, {"capture-rankx.jsonl", "other.txt", "capture.jsonl", "capture-rank1.jsonl", "stdout.txt"}),
    ],
)
def test_what_an_earlier_run_left_is_deleted_and_nothing_else(tmp_path, from_rank, stays):
    names = ["capture.jsonl", "explain.jsonl", "comparison.jsonl", "report.html", "capture-process0.jsonl"]
    names += [f"capture-rank{rank}.jsonl" for rank in (1, 2, 30)]
    for name in [*names, "capture-rankx.jsonl", "stdout.txt", "other.txt"]:
        (tmp_path / name).write_text("")
    discard_captures(tmp_path, from_rank=from_rank)
    assert {path.name for path in tmp_path.iterdir()} == stays


def test_what_cannot_be_deleted_is_refused(tmp_path):
    (tmp_path / "capture.jsonl").mkdir()
    with pytest.raises(
        FileError, match=rf"cannot delete what an earlier run left, {tmp_path}/capture.jsonl: "
    ):
        discard_captures(tmp_path)
