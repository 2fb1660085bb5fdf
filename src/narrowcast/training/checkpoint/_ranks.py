"""One checkpoint of several ranks: a folder that is complete or not there.

    PATH/checkpoint.narrowcast    names the folder with the data; replaced in one step, at the end
    PATH/0123...cdef/rank_0.pt    the tree of rank 0, as a checkpoint file
    PATH/0123...cdef/rank_1.pt    that of rank 1, without the tensors that are equal to those of rank 0
    PATH/0123...cdef/sharded.pt   metadata of DTensors
    PATH/0123...cdef/...          DTensors, by torch.distributed.checkpoint

In the tree of a rank, a tensor on the "meta" device stands for one that is in another file.

``torch.distributed.checkpoint`` alone would not do for the rest of the tree. It writes one rank's value where
ranks have different ones (generators, positions, statistics of batch norms), runs the code in a file when it
loads what is no tensor, and notices neither a damaged byte nor a file of an earlier save.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
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

MARKER = "checkpoint.narrowcast"
SHARDED = "sharded.pt"
_DATA = re.compile(r"[0-9a-f]{32}")
Result = TypeVar("Result")


class Ranks:
    """The processes that save or load together: all of ``torch.distributed``, or this one alone."""

    def __init__(self) -> None:
        self.together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = 0
        self.count = 1
        if self.together:
            self.rank = dist.get_rank()
            self.count = dist.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        """Return ``value`` of every rank, in their order."""
        if not self.together:
            return [value]
        values: list[Any] = [None] * self.count
        try:
            dist.all_gather_object(values, value)
        except RuntimeError as error:
            error.add_note(
                f"rank {self.rank} waited here for the others: every rank calls save_checkpoint and "
                "load_checkpoint, with the same path; not under `if rank == 0`"
            )
            raise
        return values

    def agreed(self, work: Callable[[], Result]) -> Result:
        """Return what ``work`` returns; if it raises on one rank, raise on every rank, so that none waits.

        Raises:
            CheckpointError: it failed on another rank.
        """
        if not self.together:
            return work()
        result = None
        error = None
        failure = None
        try:
            result = work()
        except Exception as raised:
            error = raised
            failure = f"{type(error).__name__}: {error}"

        failures = self.gather(failure)
        if error is not None:
            raise error
        for rank, failure_there in enumerate(failures):
            if failure_there is not None:
                raise CheckpointError(f"rank {rank} failed: {failure_there}")
        return result  # type: ignore[return-value]

    def agreed_on_first(self, work: Callable[[], Result]) -> Result | None:
        """Do ``work`` on rank 0 alone, and return what it returns there; None on other ranks."""
        return self.agreed(lambda: work() if self.rank == 0 else None)


# ---- writing


def write(path: Path, tree: dict[str, Any], ranks: Ranks) -> None:
    """Make the folder at ``path`` hold ``tree`` instead of an earlier checkpoint; every rank calls it.

    Raises:
        CheckpointError: a rank could not write; the earlier checkpoint is unchanged.
        OSError: the same, on this rank.
    """
    name = ranks.agreed_on_first(lambda: _new_data_folder(path))
    data = path / ranks.gather(name)[0]
    try:
        shards, digests = ranks.agreed(lambda: _shards_and_digests(tree))
        digests_of_first = ranks.gather(digests)[0]
        differing = [place for place in digests if digests[place] != digests_of_first.get(place)]

        # Leave out tensors that are equal on rank 0, which are read from its file, and DTensors, which are
        # read from torch's files.
        own = tree
        if ranks.rank > 0:
            own = _without_tensors_at(tree, digests.keys() - set(differing))
        own = _without_tensors_at(own, shards.keys())
        ranks.agreed(lambda: _file.write(data / f"rank_{ranks.rank}.pt", own))
        if shards:
            _save_shards(data, shards, ranks)

        # By now every rank has written its files, so the list is complete. Each rank hashes some of them.
        names = ranks.agreed(lambda: sorted(file.name for file in data.iterdir()))
        sums = ranks.agreed(lambda: _sums(data, names, ranks))
        all_sums: dict[str, list[Any]] = {}
        all_differing: set[Place] = set()
        for sums_of_rank, differing_of_rank in ranks.gather((sums, differing)):
            all_sums |= sums_of_rank
            all_differing |= set(differing_of_rank)
        marker = {
            "data": data.name,
            "ranks": ranks.count,
            "files": all_sums,
            "differing": sorted(all_differing, key=str),
        }
        ranks.agreed_on_first(lambda: _finish(path, marker))
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(data, ignore_errors=True)
        raise


def _new_data_folder(path: Path) -> str:
    """Make a new folder for data and return its name; remove what killed writers left."""
    if path.exists() and not path.is_dir():
        raise CheckpointError(
            f"{path} is a file, and several ranks save into a folder: give another path, or remove it"
        )
    path.mkdir(exist_ok=True)
    has_marker = (path / MARKER).exists()
    foreign = []
    for file in path.iterdir():
        # A first save that was killed while it wrote the marker leaves the marker's temporary file.
        is_part_of_marker = file.name.startswith(f".{MARKER}.") and file.name.endswith(".part")
        if not _DATA.fullmatch(file.name) and not is_part_of_marker:
            foreign.append(file)
    if foreign and not has_marker:
        raise CheckpointError(f"{path} is a folder with other files in it: give a path inside it")

    # If the marker is damaged, it is not known which data it named: keep everything.
    with contextlib.suppress(CheckpointError):
        in_use = None
        if has_marker:
            in_use = _read_marker(path)["data"]
        _remove_data(path, kept=in_use)

    name = uuid.uuid4().hex
    (path / name).mkdir()
    return name


def _shards_and_digests(tree: dict[str, Any]) -> tuple[dict[Place, torch.Tensor], dict[Place, str]]:
    """Return the DTensors of a tree, and a digest of each other value by which ranks compare theirs.

    DDP keeps most tensors equal on all ranks, but not buffers between two forward passes.
    """
    shards: dict[Place, torch.Tensor] = {}
    digests: dict[Place, str] = {}

    def visit(value: Any, place: Place) -> Any:
        if hasattr(value, "device_mesh"):
            shards[place] = value
        elif isinstance(value, torch.Tensor):
            digests[place] = _digest(value)
        elif place[0] != "random":  # left out, since each rank reads its own random states
            digests[place] = repr(value)
        return value

    mapped(tree, visit)
    return shards, digests


_PIECE_WORDS = 2**16
# Any large odd number. The sum is multiplied by it before each piece, so that the order of pieces counts.
_BETWEEN_PIECES = 0x2545F4914F6CDD1D


def _digest(tensor: torch.Tensor) -> str:
    """Return dtype, shape, strides and a sum of the bits of a tensor, computed on the tensor's device.

    Each word of 32 bits (each byte, if the size is no multiple of 4 bytes) is multiplied by a random odd
    number of 62 bits, and the products are summed modulo 2**64. A change of one word always changes the sum;
    a change of several leaves it the same with a probability of about 2**-32.
    """
    words = tensor.contiguous().flatten().view(torch.uint8)
    if words.numel() % 4 == 0:
        words = words.view(torch.int32)
    factors = _factors(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    # In pieces, since the products take two or more times the memory of the words.
    for piece in torch.split(words, _PIECE_WORDS):
        total = total * _BETWEEN_PIECES + (piece * factors[: len(piece)]).sum()
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {int(total)}"


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)  # the same on every rank
    return (torch.randint(2**62, (_PIECE_WORDS,), generator=generator) | 1).to(device)


def _without_tensors_at(tree: dict[str, Any], places: Any) -> dict[str, Any]:
    """Copy a tree with tensors without memory at ``places``."""

    def stand_in(value: Any, place: Place) -> Any:
        if isinstance(value, torch.Tensor) and place in places:
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return value

    copy: dict[str, Any] = mapped(tree, stand_in)
    return copy


def _save_shards(data: Path, shards: Mapping[Place, torch.Tensor], ranks: Ranks) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    def write_metadata() -> None:
        # Read from the file, since what ``save`` of torch 2.11 returns lacks storage_data.
        metadata = FileSystemReader(data).read_metadata()
        metadata.storage_meta = None  # it holds the path, which may change
        _file.write(data / SHARDED, {"metadata": metadata})

    named_shards = {name_of(place): shard for place, shard in shards.items()}
    with _errors_of_torch():
        save(named_shards, storage_writer=FileSystemWriter(data))
    ranks.agreed_on_first(write_metadata)


@contextlib.contextmanager
def _errors_of_torch() -> Iterator[None]:
    """Raise a CheckpointError for torch's own error, which does not derive from ``Exception``."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield
        except CheckpointException as error:
            rank = 0
            cause: BaseException = error
            if error.failures:
                # A dict from ranks to pairs of an exception and its traceback.
                rank, (cause, _) = next(iter(error.failures.items()))
            raise CheckpointError(f"torch.distributed.checkpoint failed on rank {rank}: {cause}") from error


def _sums(data: Path, names: list[str], ranks: Ranks) -> dict[str, list[Any]]:
    """Return size in bytes and SHA-256 of this rank's share of the files."""
    sums: dict[str, list[Any]] = {}
    for name in names[ranks.rank :: ranks.count]:
        with (data / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            sums[name] = [file.tell(), digest]
    return sums


def _finish(path: Path, marker: dict[str, Any]) -> None:
    # The data has to be on the disk before the marker names it.
    sync_folder(path / marker["data"])
    sync_folder(path)
    _file.write(path / MARKER, marker)
    _remove_data(path, kept=marker["data"])


def _remove_data(path: Path, kept: str | None) -> None:
    for folder in path.iterdir():
        if _DATA.fullmatch(folder.name) and folder.name != kept:
            shutil.rmtree(folder, ignore_errors=True)


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
    """Read a folder, and check size and SHA-256 of every file in it.

    Raises:
        CheckpointError: a file is missing, altered, or of a newer version.
    """
    marker = ranks.agreed(lambda: _read_marker(path))
    data = path / marker["data"]

    def read_trees() -> tuple[dict[str, Any], dict[str, Any] | None]:
        missing = [name for name in marker["files"] if not (data / name).is_file()]
        if missing:
            raise damaged(path, f"{', '.join(missing)} missing from {data}")
        for name, now in _sums(data, sorted(marker["files"]), ranks).items():
            before = marker["files"][name]
            if now != before:
                raise damaged(path, f"{name} is {now}, and was {before} (bytes, SHA-256)")

        common = _file.read(data / "rank_0.pt")
        if ranks.rank == 0:
            return common, common
        if ranks.rank < marker["ranks"]:
            return common, _file.read(data / f"rank_{ranks.rank}.pt")
        return common, None

    common, own = ranks.agreed(read_trees)
    return Saved(common, own, marker["ranks"], marker["differing"], data)


def _read_marker(path: Path) -> dict[str, Any]:
    if not (path / MARKER).is_file():
        raise CheckpointError(
            f"the folder {path} holds no complete checkpoint: {MARKER} is missing, as after a first "
            "save that was killed"
        )
    return _file.read(path / MARKER)


def tree_for(saved: Saved, ranks: Ranks, fit: Fit, layouts: Mapping[Place, Any]) -> dict[str, Any]:
    """Return the tree that this rank continues from: its own if as many ranks saved, else mostly rank 0's.

    Its tensors hold their values: as DTensors where ``layouts`` has one, otherwise whole and on the CPU.
    """
    if saved.ranks == ranks.count:
        assert saved.own is not None
        return _with_tensors(saved.own, saved, layouts)

    # Take the values of rank 0, except for random states and positions, which differ by rank.
    tree = dict(saved.common)
    if saved.own is None:
        tree["random"] = None
    else:
        tree["random"] = saved.own["random"]
        tree["position"] = saved.own["position"]
    _note_other_count(saved, ranks, fit)
    return _with_tensors(tree, saved, layouts)


def _note_other_count(saved: Saved, ranks: Ranks, fit: Fit) -> None:
    """Note what changes with another number of ranks; refuse if ranks had different states of objects.

    Objects are optimizers, held weights, schedulers and scalers.
    """
    fit.notes.append(
        f"the checkpoint is of {_ranks_in_words(saved.ranks)}, loaded by {_ranks_in_words(ranks.count)}"
    )
    if ranks.count > saved.ranks:
        fit.notes.append(f"random states: ranks from {saved.ranks} on have none in it, and keep their own")
    else:
        fit.notes.append(f"random states: those of ranks from {ranks.count} on are not used")

    differing_states = []
    replaced = []
    for place in saved.differing:
        name = name_of(place)
        if place[0] == "objects" and "generators" not in place:
            differing_states.append(name)
        elif place[0] in ("model", "objects"):
            replaced.append(name)
    if any(place[0] == "position" for place in saved.differing):
        fit.notes.append("each rank takes its own position, and new ranks that of rank 0")
    if differing_states:
        fit.refuse(
            f"ranks had different values of {few(differing_states, 5)}",
            "Load it with as many ranks as saved it",
        )
    if replaced:
        fit.notes.append(
            f"ranks had different values of {few(replaced, 5)}: every rank takes those of rank 0"
        )


def _ranks_in_words(count: int) -> str:
    if count == 1:
        return "1 rank"
    return f"{count} ranks"


def _with_tensors(tree: dict[str, Any], saved: Saved, layouts: Mapping[Place, Any]) -> dict[str, Any]:
    """Copy a tree with the values of all its tensors, sharded as ``layouts`` says."""
    from_shards: dict[str, torch.Tensor] = {}

    def fill(value: Any, place: Place) -> Any:
        if isinstance(value, torch.Tensor) and value.is_meta:
            # In the tree of rank 0 it is a tensor, or stands for one that was a DTensor.
            value = functools.reduce(operator.getitem, place, saved.common)
        if not isinstance(value, torch.Tensor):
            return value

        layout = _layout_of(value, place, layouts)
        if value.is_meta:
            # A DTensor was saved: allocate memory, which is filled at the end.
            if layout is None:
                memory = torch.empty_like(value, device="cpu")
            else:
                memory = torch.empty_like(layout, dtype=value.dtype).detach()
            from_shards[name_of(place)] = memory
            return memory
        if layout is None:
            return value
        from torch.distributed.tensor import distribute_tensor

        # This rank's part of a whole tensor, which every rank has.
        return distribute_tensor(value, layout.device_mesh, layout.placements, src_data_rank=None)

    filled: dict[str, Any] = mapped(tree, fill)
    if from_shards and saved.data is not None:
        _load_shards(saved.data, from_shards)
    return filled


def _layout_of(value: torch.Tensor, place: Place, layouts: Mapping[Place, Any]) -> Any:
    """Return the DTensor that decides how the tensor at ``place`` is sharded; None if it stays whole."""
    of_parameter = place[:-1]  # for a state of its optimizer
    layout: Any = layouts.get(place, layouts.get(of_parameter))
    if not hasattr(layout, "device_mesh") or layout.shape != value.shape or place[-1] == "step":
        return None
    return layout


def _load_shards(data: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Read the values of ``tensors``: of a DTensor this rank's part, of other tensors the whole."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata = _file.read(data / SHARDED, metadata_classes())["metadata"]

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata  # torch's own method would run code in its file .metadata

    with _errors_of_torch():
        load(tensors, storage_reader=Reader(data), no_dist=True)  # each rank reads for itself
