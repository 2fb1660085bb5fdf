"""One checkpoint of several ranks: a folder that is complete or not there.

    PATH/checkpoint.narrowcast    names the folder with the data; replaced in one step, at the end
    PATH/0123...cdef/rank_0.pt    the tree of rank 0, as a checkpoint file
    PATH/0123...cdef/rank_1.pt    that of rank 1, without the tensors that are equal to those of rank 0
    PATH/0123...cdef/sharded.pt   metadata of DTensors
    PATH/0123...cdef/...          DTensors, by torch.distributed.checkpoint

In the tree of a rank, a tensor on the "meta" device stands for one that is in another file.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import operator
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from narrowcast._files import sync_folder
from narrowcast.errors import CheckpointError, few
from narrowcast.training._state import Fit
from narrowcast.training._torch_internals import metadata_classes
from narrowcast.training.checkpoint import _file
from narrowcast.training.checkpoint._file import Place, damaged, mapped, name_of

MARKER, SHARDED = "checkpoint.narrowcast", "sharded.pt"
_DATA = re.compile(r"[0-9a-f]{32}")
Result = TypeVar("Result")


class Ranks:
    """The processes that save or load together: all of ``torch.distributed``, or this one alone."""

    def __init__(self) -> None:
        self.together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.together else 0
        self.count = dist.get_world_size() if self.together else 1

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, in their order."""
        if not self.together:
            return [value]
        gathered: list[Any] = [None] * self.count
        try:
            dist.all_gather_object(gathered, value)
        except RuntimeError as error:
            error.add_note(
                f"rank {self.rank} waited here for the others: every rank calls save_checkpoint and "
                "load_checkpoint, with the same path; not under `if rank == 0`"
            )
            raise
        return gathered

    def agreed(self, work: Callable[[], Result]) -> Result:
        """Return what ``work`` returns; if it raises on one rank, raise on every rank, so that none waits.

        Raises:
            CheckpointError: it failed on another rank.
        """
        if not self.together:
            return work()
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        failures = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise CheckpointError(f"rank {rank} failed: {failure}")
        return result  # type: ignore[return-value]


# ---- writing


def write(path: Path, tree: dict[str, Any], ranks: Ranks) -> None:
    """Make the folder at ``path`` hold ``tree`` instead of an earlier checkpoint; every rank calls it.

    Raises:
        CheckpointError: a rank could not write; the earlier checkpoint is unchanged.
        OSError: the same, on this rank.
    """
    made = ranks.agreed(lambda: _new_folder(path) if ranks.rank == 0 else "")
    data = path / ranks.gather(made)[0]
    try:
        own, sharded, differing = _split(tree, ranks)
        ranks.agreed(lambda: _file.write(data / f"rank_{ranks.rank}.pt", own))
        if sharded:
            _save_sharded(data, sharded, ranks)
        sums = ranks.agreed(lambda: _sums(data, sorted(one.name for one in data.iterdir()), ranks))
        found = ranks.gather((sums, differing))
        body = {
            "data": data.name,
            "ranks": ranks.count,
            "files": {name: entry for sums, _ in found for name, entry in sums.items()},
            "differing": sorted({place for _, places in found for place in places}, key=str),
        }
        ranks.agreed(lambda: _finish(path, body) if ranks.rank == 0 else None)
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(data, ignore_errors=True)
        raise


def _split(tree: dict[str, Any], ranks: Ranks) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[Place]]:
    """The tree that this rank writes, its DTensors by name, and the places whose values differ from rank 0.

    DDP keeps most tensors equal on all ranks, but not buffers between two forward passes.
    """
    sums: dict[Place, str] = {}
    sharded: dict[str, torch.Tensor] = {}

    def note(value: Any, place: Place) -> Any:
        if hasattr(value, "device_mesh"):
            sharded[name_of(place)] = value
        elif isinstance(value, torch.Tensor):
            file = io.BytesIO()  # of values, shape, dtype and order of dimensions
            torch.save(value.cpu(), file)
            sums[place] = hashlib.sha256(file.getbuffer()).hexdigest()
        elif place[0] != "random":
            sums[place] = repr(value)
        return value

    ranks.agreed(lambda: mapped(tree, note))
    first = ranks.gather(sums)[0]

    def own(value: Any, place: Place) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        elsewhere = ranks.rank > 0 and place in sums and sums[place] == first.get(place)
        if elsewhere or hasattr(value, "device_mesh"):
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return value

    return mapped(tree, own), sharded, [place for place in sums if sums[place] != first.get(place)]


def _new_folder(path: Path) -> str:
    """Make a new folder for data and return its name; remove what killed writers left."""
    if path.exists() and not path.is_dir():
        raise CheckpointError(
            f"{path} is a file, and several ranks save into a folder: give another path, or remove it"
        )
    path.mkdir(exist_ok=True)
    if not (path / MARKER).exists() and any(not _DATA.fullmatch(one.name) for one in path.iterdir()):
        raise CheckpointError(f"{path} is a folder with other files in it: give a path inside it")
    with contextlib.suppress(CheckpointError):  # if the checkpoint is damaged, everything stays
        _remove_data(path, kept=_read_marker(path)["data"] if (path / MARKER).exists() else None)
    name = uuid.uuid4().hex
    (path / name).mkdir()
    return name


def _save_sharded(data: Path, sharded: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    def write() -> None:
        metadata = FileSystemReader(data).read_metadata()  # what torch 2.11 returns lacks storage_data
        metadata.storage_meta = None  # the path
        _file.write(data / SHARDED, {"metadata": metadata})

    with _errors_of_torch():
        save(dict(sharded), storage_writer=FileSystemWriter(data))
    ranks.agreed(lambda: write() if ranks.rank == 0 else None)


@contextlib.contextmanager
def _errors_of_torch() -> Any:
    """Raise a CheckpointError for torch's own error, which is no ``Exception``."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()), (0, (error, None)))
            raise CheckpointError(f"torch.distributed.checkpoint failed on rank {rank}: {cause}") from error


def _sums(data: Path, names: list[str], ranks: Ranks) -> dict[str, list[Any]]:
    """Size in bytes and SHA-256 of this rank's share of the files."""
    found: dict[str, list[Any]] = {}
    for name in names[ranks.rank :: ranks.count]:
        with (data / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[name] = [file.tell(), digest]
    return found


def _finish(path: Path, body: dict[str, Any]) -> None:
    sync_folder(path / body["data"])
    sync_folder(path)
    _file.write(path / MARKER, body)
    _remove_data(path, kept=body["data"])


def _remove_data(path: Path, kept: str | None) -> None:
    for one in path.iterdir():
        if _DATA.fullmatch(one.name) and one.name != kept:
            shutil.rmtree(one, ignore_errors=True)


# ---- reading


@dataclass
class Saved:
    """A checkpoint that was read and not yet adapted to this rank.

    Attributes:
        common: the tree of rank 0.
        own: the tree of this rank; None if it was saved by fewer ranks.
        ranks: how many ranks saved it.
        differing: places of values that were not equal on all ranks.
        data: the folder with DTensors; None for a file.
    """

    common: dict[str, Any]
    own: dict[str, Any] | None
    ranks: int = 1
    differing: list[Place] = field(default_factory=list)
    data: Path | None = None


def read(path: Path, ranks: Ranks) -> Saved:
    """Read a folder, in which every byte of every file is as it was written.

    Raises:
        CheckpointError: a file is missing, altered, or of a newer version.
    """
    body = ranks.agreed(lambda: _read_marker(path))
    data = path / body["data"]

    def load() -> tuple[dict[str, Any], dict[str, Any] | None]:
        lost = [name for name in body["files"] if not (data / name).is_file()]
        if lost:
            raise damaged(path, f"{', '.join(lost)} missing from {data}")
        for name, found in _sums(data, sorted(body["files"]), ranks).items():
            if found != body["files"][name]:
                raise damaged(path, f"{name} is {found}, and was {body['files'][name]} (bytes, SHA-256)")
        common = _file.read(data / "rank_0.pt")
        if ranks.rank == 0:
            return common, common
        return common, _file.read(data / f"rank_{ranks.rank}.pt") if ranks.rank < body["ranks"] else None

    common, own = ranks.agreed(load)
    return Saved(common, own, body["ranks"], body["differing"], data)


def _read_marker(path: Path) -> dict[str, Any]:
    if not (path / MARKER).is_file():
        raise CheckpointError(
            f"the folder {path} holds no complete checkpoint: {MARKER} is missing, as after a first "
            "save that was killed"
        )
    return _file.read(path / MARKER)


def tree_for(saved: Saved, ranks: Ranks, fit: Fit, layouts: Mapping[Place, Any]) -> dict[str, Any]:
    """The tree that this rank continues from: its own if as many ranks saved, otherwise mostly rank 0's.

    Tensors are in memory: as DTensors where ``layouts`` has one, otherwise whole and on the CPU.
    """
    common, own = saved.common, saved.own
    tree = own if own is not None else common
    if saved.ranks != ranks.count:
        mine = {key: tree[key] for key in ("random", "position")}
        tree = {**common, **mine, **({"random": None} if own is None else {})}
        _note_other_count(saved, ranks, fit)
    sharded: dict[str, torch.Tensor] = {}  # what torch.distributed.checkpoint saved, read in place

    def leaf(value: Any, place: Place) -> Any:
        if isinstance(value, torch.Tensor) and value.is_meta:
            value = functools.reduce(operator.getitem, place, common)
        like = _like(value, place, layouts)
        if isinstance(value, torch.Tensor) and value.is_meta:
            device = "cpu" if like is None else like.device
            empty = torch.empty_like(value if like is None else like, dtype=value.dtype, device=device)
            sharded[name_of(place)] = empty.detach()
            return sharded[name_of(place)]
        if like is None:
            return value
        from torch.distributed.tensor import distribute_tensor

        # This rank's part of a whole tensor, which every rank has.
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)

    cut: dict[str, Any] = mapped(tree, leaf)
    if sharded and saved.data is not None:
        _load_sharded(saved.data, sharded)
    return cut


def _note_other_count(saved: Saved, ranks: Ranks, fit: Fit) -> None:
    here = f"{ranks.count} rank{'s' * (ranks.count != 1)}"
    fit.notes.append(f"the checkpoint is of {saved.ranks} rank{'s' * (saved.ranks != 1)}, loaded by {here}")
    fit.notes.append(
        f"random states: ranks from {saved.ranks} on have none in it, and keep their own"
        if ranks.count > saved.ranks
        else f"random states: those of ranks from {ranks.count} on are not used"
    )
    if any(place[0] == "position" for place in saved.differing):
        fit.notes.append("each rank takes its own position, and new ranks that of rank 0")
    places = [place for place in saved.differing if place[0] in ("model", "objects")]
    states = [name_of(place) for place in places if place[0] == "objects" and "generators" not in place]
    if states:
        fit.refuse(
            f"ranks had different values of {few(states, 5)}", "Load it with as many ranks as saved it"
        )
    if places:
        names = few([name_of(place) for place in places], 5)
        fit.notes.append(f"ranks had different values of {names}: every rank takes those of rank 0")


def _load_sharded(data: Path, sharded: dict[str, torch.Tensor]) -> None:
    """Read the values of ``sharded``: of a DTensor this rank's part, of other tensors the whole."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata = _file.read(data / SHARDED, metadata_classes())["metadata"]

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata  # torch's own method would run code in its file .metadata

    with _errors_of_torch():
        load(sharded, storage_reader=Reader(data), no_dist=True)  # each rank reads for itself


def _like(value: Any, place: Place, layouts: Mapping[Place, Any]) -> Any:
    """The DTensor that decides how the tensor at ``place`` is cut; None for values that stay whole."""
    like = layouts.get(place, layouts.get(place[:-1]))
    fits = isinstance(value, torch.Tensor) and hasattr(like, "device_mesh") and like.shape == value.shape
    return like if fits and place[-1] != "step" else None
