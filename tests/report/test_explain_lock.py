"""Lock files: the same decisions give the same text, other ones a readable difference."""

import re
import tomllib
from pathlib import Path

import made_captures
import pytest
from msgspec.structs import replace

from narrowcast.errors import FileError
from narrowcast.report import (
    check_text,
    decided_sites,
    differences,
    facts_changed,
    lock_of,
    policies_text,
    read_lock,
    write_lock,
)
from narrowcast.report._explanation import explained, read_explanation

SITE = made_captures.site


def explanation_of(tmp_path, sites, **changed):
    events = made_captures.explained_events(**changed)
    made_captures.explained_run(tmp_path, [events[0], *sites, events[-1]])
    return explained(read_explanation(tmp_path / "explain.jsonl"))


def lock_from(tmp_path, sites, **changed):
    return lock_of(explanation_of(tmp_path, sites, **changed))


# The made run has 2 steps, and a site has 2 calls unless said; a lock counts the calls a step.
SITES = [
    SITE("blocks.0.norm", "layer_norm", "fp32", None, "fp32"),
    SITE("blocks.0", "bmm", "fp32+bf16", "bf16", "bf16", within=["einsum"]),
    SITE("blocks.0", "bmm", "bf16", "bf16", "bf16", within=["einsum"], calls=3),
    SITE('odd "name"\\', "softmax.int", "bf16", "fp16", "fp16", rule='modules "odd": fp16'),
    # Not in a lock: views, what is outside of modules, backward passes.
    SITE("blocks.0", "view", "bf16", None, "bf16", kind="view"),
    SITE(None, "_to_copy", "bf16", None, "fp32", phase="outside", because="outside of every region"),
    SITE("blocks.0", "mm", "bf16", None, "bf16", phase="backward", because="backward: as the forward"),
    SITE(
        "fp8", "linear", "bf16", "fp8_rowwise", "fp32",
        phase="backward", rule="linear: fp8_rowwise", because="backward: through fp8, as the forward",
    ),
]  # fmt: skip
TEXT = """\
# What ran in which format: narrowcast explain --lock wrote it, --check compares.
version = 1
policy = "bf16"
torch = "2.13.0"
device = "cuda: Some GPU"
format = "bf16"
sites = [
  {module = "blocks.0.norm", op = "layer_norm", in = "fp32", as = "", out = "fp32", by = "unlisted", calls = 1},
  {module = "blocks.0", op = "einsum > bmm", in = "fp32+bf16", as = "bf16", out = "bf16", by = "table", calls = 1},
  {module = "blocks.0", op = "einsum > bmm", in = "bf16", as = "bf16", out = "bf16", by = "table", calls = 1.5},
  {module = "odd \\"name\\"\\\\", op = "softmax.int", in = "bf16", as = "fp16", out = "fp16", by = "modules \\"odd\\": fp16", calls = 1},
]
"""  # noqa: E501


def test_the_file_to_the_letter_and_back(tmp_path):
    lock = lock_from(tmp_path, SITES)
    path = tmp_path / "policy.lock"
    write_lock(lock, path)
    assert path.read_text() == TEXT
    assert read_lock(path) == lock
    assert tomllib.loads(TEXT)["sites"][3]["module"] == 'odd "name"\\'
    assert not list(tmp_path.glob(".policy*"))  # no temporary file is left


def test_differences_of_two_policies(tmp_path):
    layers = [SITE(f"blocks.{n}.norm", "layer_norm", "fp32", None, "fp32") for n in range(3)]
    ruled = [
        one | {"computes": "fp32", "outputs": ["bf16"], "rule": "layer_norm: fp32, handed on in lower"}
        for one in layers
    ]
    new = SITE("head.extra", "linear", "fp32", "bf16", "bf16", calls=4)
    before = explanation_of(tmp_path, layers)
    after = explanation_of(tmp_path, [*ruled, new]) | {"policy": "safe"}
    found = differences(decided_sites(before), decided_sites(after))
    norms = [f"blocks.{n}.norm" for n in range(3)]
    assert [one.to_dict()["module"] for one in found] == [*norms, "head.extra"]
    assert found[-1].to_dict()["after"][0]["inputs"] == "fp32"
    text = policies_text(before, after, found)
    assert (
        "train.py --epochs 3: the policies bf16 and safe differ about 4 operators in its\n"
        "  modules.\n\n"
        "  blocks.*.norm x 3: layer_norm\n"
        "    bf16  fp32 -> fp32, unlisted\n"
        "    safe  fp32 as fp32 -> bf16, by layer_norm: fp32, handed on in lower\n"
        "  head.extra: linear\n"
        "    bf16  not called\n"
        "    safe  fp32 as bf16 -> bf16, by table, 2 calls\n\n"
        "bf16  48 casts a step, 4.0 MiB; 98 % of the matmul time narrower than fp32\n"
    ) in text
    assert max(map(len, text.splitlines())) <= 79
    assert policies_text(before, after, found, every=True).count("layer_norm\n") == 3
    assert "decide the same about every\n" in policies_text(before, before, [])


def test_what_changed_around_equal_decisions_is_said(tmp_path):
    before = lock_from(tmp_path, SITES)
    after = replace(before, torch="2.14.0", device="cpu")
    assert facts_changed(before, after) == ["torch 2.13.0 is now 2.14.0", "device cuda: Some GPU is now cpu"]
    text = " ".join(check_text(before, after, [], "policy.lock", every=False).split())
    assert text.startswith(
        "policy.lock: all 4 decisions are as they were (torch 2.13.0 is now 2.14.0; device"
    )
    found = differences(before.sites, before.sites[:-1])
    text = check_text(before, before, found, "policy.lock", every=False)
    assert text.startswith("policy.lock: 1 decision differs.\n\n  odd")
    assert text.endswith("If this is intended: write the lock anew with narrowcast explain --lock.")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "is not a lock file: "),
        ("", "is not a lock file: Object missing required field `policy`; write it anew"),
        ("version = 2", "is of version 2, and this narrowcast reads up to 1: update narrowcast, or write it"),
        (TEXT.replace('torch = "2.13.0"', "torch = 2.13"), "is not a lock file: Expected `str`"),
        (TEXT.replace("calls = 1}", "place = 1}"), "field `place` - at `$.sites[0]`"),
        (TEXT.replace("calls = 1.5", "calls = '1'"), "$.sites[2].calls"),
    ],
    ids=range(6),
)
def test_what_is_no_lock_file_is_one_clear_error(tmp_path, text, said):
    path = tmp_path / "policy.lock"
    path.write_text(text)
    with pytest.raises(FileError, match=re.escape(said)):
        read_lock(path)


def test_a_file_that_is_no_text_is_one_clear_error(tmp_path):
    path = tmp_path / "policy.lock"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileError, match="is not a lock file: 'utf-8' codec can't decode"):
        read_lock(path)


def test_a_file_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(FileError, match=r"cannot read the lock file .*absent.lock: No such file"):
        read_lock(tmp_path / "absent.lock")
    with pytest.raises(FileError, match=r"cannot write the lock file .*: No such file"):
        write_lock(lock_from(tmp_path, SITES), tmp_path / "no folder" / "policy.lock")


@pytest.mark.parametrize(
    ("asked", "written"),
    [
        ("bf16", "bf16"),  # a preset
        ("rules.toml", "../rules.toml"),
        ("locks/rules.toml", "rules.toml"),
        # Without ".toml" and a slash it would be the name of a preset.
        ("./locks/rules", "./rules"),
    ],
)
def test_a_policy_file_is_written_as_seen_from_the_lock(tmp_path, monkeypatch, asked, written):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "locks").mkdir()
    lock = lock_from(tmp_path, SITES)
    write_lock(replace(lock, policy=asked), Path("locks/policy.lock"))
    path = tmp_path / "locks" / "policy.lock"
    assert tomllib.loads(path.read_text())["policy"] == written
    assert read_lock(path).policy == asked.removeprefix("./")
    monkeypatch.chdir(tmp_path / "locks")
    assert read_lock(Path("policy.lock")).policy == written
