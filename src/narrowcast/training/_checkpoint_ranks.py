"""One checkpoint of several ranks: a folder of ``torch.distributed.checkpoint``, complete or not at all.

    PATH/checkpoint.narrowcast    names the folder of the data, and holds what is no tensor
    PATH/0123...cdef/             what torch.distributed.checkpoint wrote

The first is replaced at once when everything else is on the disk, so that a kill leaves the last complete
one. It holds a SHA-256 of every file and of itself. Tensors that every rank has alike are there once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from narrowcast.errors import CheckpointError
from narrowcast.training._checkpoint_file import VERSION, bytes_of, damaged, newer, replaced, sync_folder
from narrowcast.training._checkpoint_groups import Fit, few
from narrowcast.training._checkpoint_tree import dtype_named, tensor_nodes
from narrowcast.training._torch_internals import read_metadata_of_tensors

MARKER = "checkpoint.narrowcast"
_FIRST_WORDS = b"narrowcast checkpoint of ranks"
_FOLDER = re.compile(r"[0-9a-f]{32}")
_PIECE_BYTES = 2**22
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
        """What ``work`` returns; where it raises on some rank, an error on every rank, so that none waits.

        Raises:
            CheckpointError: it went wrong on another rank.
        """
        if not self.together:
            return work()
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        told = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, words in enumerate(told):
            if words is not None:
                raise CheckpointError(f"rank {rank} could not go on: {words}")
        return result  # type: ignore[return-value]


def write(path: Path, state: dict[str, Any], tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    """Make the folder at ``path`` hold this checkpoint instead of an earlier one; every rank calls it.

    Raises:
        CheckpointError: some rank could not write. What was there is as before.
        OSError: the same, of this rank.
    """
    made = ranks.agreed(lambda: _new_folder(path) if ranks.rank == 0 else "")
    data = path / ranks.gather(made)[0]
    try:
        mine, own = _own(tensors, ranks)
        _save_tensors(data, mine, ranks)
        sums = ranks.agreed(lambda: _sums(data, _share(data, ranks)))
        parts = ranks.gather((sums, _renamed(state, own, ranks.rank)))
        common = parts[0][1]
        differences = {
            str(rank): {key: value for key, value in theirs.items() if value != common[key]}
            for rank, (_, theirs) in enumerate(parts)
        }
        body = {
            "data": data.name,
            "files": {name: entry for found, _ in parts for name, entry in found.items()},
            "ranks": ranks.count,
            "state": common,
            "of_rank": differences,
        }
        ranks.agreed(lambda: _finish(path, body) if ranks.rank == 0 else None)
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(data, ignore_errors=True)
        raise


def is_one(path: Path) -> bool:
    return path.is_dir() and (path / MARKER).is_file()


def read(path: Path, ranks: Ranks) -> tuple[dict[str, Any], Path]:
    """What is no tensor, and the folder with the tensors, every byte of which is as it was written.

    Raises:
        CheckpointError: something is missing, altered, or of a newer version.
    """
    body = ranks.agreed(lambda: _read_marker(path / MARKER))
    data = path / body["data"]
    names = sorted(body["files"])

    def check() -> None:
        mine = names[ranks.rank :: ranks.count]
        lost = [name for name in names if not (data / name).is_file()]
        if lost:
            raise damaged(path, f"{', '.join(lost)} missing from {data}")
        for name, found in _sums(data, mine).items():
            if found != body["files"][name]:
                raise damaged(path, f"{name} is {found}, and was {body['files'][name]} (bytes, SHA-256)")

    ranks.agreed(check)
    return body, data


def state_for(body: Mapping[str, Any], ranks: Ranks, fit: Fit) -> dict[str, Any]:
    """What this rank goes on from: its own where as many ranks saved, else mostly that of rank 0."""
    common, of_rank, saved = body["state"], body["of_rank"], body["ranks"]
    own: dict[str, Any] = of_rank.get(str(ranks.rank), {})
    if saved == ranks.count:
        return {**common, **own}
    here = f"{ranks.count} rank{'s' * (ranks.count != 1)}"
    fit.notes.append(f"the checkpoint is of {saved} rank{'s' * (saved != 1)}, and was loaded by {here}")
    fit.notes.append(_said_of_random_states(saved, ranks.count))
    differing = {key for one in of_rank.values() for key in one}
    if "position" in differing:
        fit.notes.append("positions differ by rank: each rank takes its own, and new ranks that of rank 0")
    for key in sorted(differing & {"model", "stepper", "loose"}):
        _check_differing(fit, key, of_rank)
    mine = {key: own[key] for key in ("random", "position") if key in own}
    return {**common, **mine, **({} if ranks.rank < saved else {"random": None})}


def _said_of_random_states(saved: int, here: int) -> str:
    if here > saved:
        return f"random states: ranks from {saved} on have none in it, and go on from where they are"
    return f"random states: those of ranks from {here} on are not used"


def _check_differing(fit: Fit, key: str, of_rank: Mapping[str, Any]) -> None:
    """Tensors that ranks had each for itself, and that another number of ranks cannot share out."""
    places = {
        "/".join((key, *place))
        for one in of_rank.values()
        for place, node in tensor_nodes(one.get(key))
        if node["tensor"].startswith("rank ")
    }
    states = sorted(place for place in places if key != "model" and "/generators/" not in place)
    if states:
        fit.unless_strict(
            f"ranks had different values of {few(states)}",
            "Load it with as many ranks as it was saved with",
            "every rank goes on from those of rank 0",
        )
    if places - set(states):
        others = few(sorted(places - set(states)))
        fit.notes.append(f"ranks had different values of {others}: every rank goes on from those of rank 0")


def read_tensors(
    data: Path, state: Mapping[str, Any], layouts: Mapping[tuple[str, ...], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors that ``state`` names: DTensors where ``layouts`` has one, else whole and on the CPU."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with (data / ".metadata").open("rb") as file:
            metadata = read_metadata_of_tensors(file)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{data / '.metadata'} was not read: {error}") from error

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata  # torch's own method would run what is in the file

    wanted: dict[str, Any] = {}
    for place, node in _nodes(state):
        like = _like(place, node, layouts)
        dtype = dtype_named(node["dtype"])
        if like is not None and list(like.shape) == node["shape"]:
            wanted[node["tensor"]] = torch.empty_like(like, dtype=dtype).detach()
        else:
            wanted.setdefault(node["tensor"], torch.empty(node["shape"], dtype=dtype))
    with warnings.catch_warnings():
        # Each rank reads for itself.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        _translated(lambda: load(wanted, storage_reader=Reader(data), no_dist=True))
    return wanted


def distributed(
    tensor: torch.Tensor, place: tuple[str, ...], node: Mapping[str, Any], layouts: Mapping[Any, Any]
) -> torch.Tensor:
    """A whole tensor, cut into this rank's part where ``layouts`` has a DTensor; others as they are."""
    like: Any = _like(place, node, layouts)
    if like is None or hasattr(tensor, "device_mesh"):
        return tensor
    from torch.distributed.tensor import Replicate, distribute_tensor

    placements = like.placements if like.shape == tensor.shape else [Replicate()] * like.device_mesh.ndim
    cut: torch.Tensor = distribute_tensor(tensor, like.device_mesh, placements, src_data_rank=None)
    return cut


def _nodes(state: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    for key, value in state.items():
        yield from tensor_nodes(value, (key,))


def _like(place: tuple[str, ...], node: Mapping[str, Any], layouts: Mapping[Any, Any]) -> Any:
    """The DTensor that decides how a tensor is cut; None of those that stay whole."""
    like = layouts.get(place, layouts.get(place[:-1]))
    if not hasattr(like, "device_mesh") or place[-1] == "step":
        return None
    return like if node.get("sharded") or list(like.shape) == node["shape"] else None


# ---- writing


def _new_folder(path: Path) -> str:
    """The name of a new folder for data; what writers that were killed left is removed."""
    if path.exists() and not path.is_dir():
        raise CheckpointError(
            f"{path} is a file, and several ranks save into a folder: give another path, or remove it"
        )
    path.mkdir(exist_ok=True)
    others = [
        one.name for one in path.iterdir() if not _FOLDER.fullmatch(one.name) and MARKER not in one.name
    ]
    if others and not (path / MARKER).exists():
        raise CheckpointError(
            f"{path} is a folder with other things in it ({few(sorted(others))}): give the path of the "
            "checkpoint itself, as one inside it"
        )
    with contextlib.suppress(CheckpointError):  # of one that is damaged everything is left
        _remove_data(path, kept=_read_marker(path / MARKER)["data"] if (path / MARKER).exists() else None)
    name = uuid.uuid4().hex
    (path / name).mkdir()
    return name


def _own(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> tuple[dict[str, torch.Tensor], set[str]]:
    """What this rank hands to torch, and the names of whole tensors that are not those of rank 0.

    Whole tensors come from rank 0, whose buffers DDP gives to the others.
    """
    plain = {name: tensor for name, tensor in tensors.items() if not hasattr(tensor, "device_mesh")}
    sums = ranks.agreed(lambda: {name: _sum_of(tensor) for name, tensor in plain.items()})
    first = ranks.gather(sums)[0]
    own = {name for name in plain if ranks.rank and sums[name] != first.get(name)}
    mine = {name: tensor for name, tensor in tensors.items() if ranks.rank == 0 or name not in plain}
    return mine | {_name_of(ranks.rank, name): plain[name] for name in own}, own


def _name_of(rank: int, name: str) -> str:
    return f"rank {rank}/{name}"


def _sum_of(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(bytes_of(tensor))
    return digest.hexdigest()


def _renamed(state: dict[str, Any], own: set[str], rank: int) -> dict[str, Any]:
    for _, node in _nodes(state):
        if node["tensor"] in own:
            node["tensor"] = _name_of(rank, node["tensor"])
    return state


def _save_tensors(data: Path, mine: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        _translated(
            lambda: save(dict(mine), storage_writer=FileSystemWriter(data), no_dist=not ranks.together)
        )


def _translated(work: Callable[[], Any]) -> None:
    """torch's own error is no ``Exception``, and would end a program that catches those."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        work()
    except CheckpointException as error:
        first = next(iter(error.failures.items()), (0, (error, None)))
        raise CheckpointError(
            f"torch.distributed.checkpoint failed on rank {first[0]}: {first[1][0]}"
        ) from error


def _share(data: Path, ranks: Ranks) -> list[str]:
    """The files that this rank looks at: each is one rank's."""
    return sorted(one.name for one in data.iterdir())[ranks.rank :: ranks.count]


def _sums(data: Path, names: Iterable[str]) -> dict[str, list[Any]]:
    """Size and SHA-256 of files."""
    found: dict[str, list[Any]] = {}
    for name in names:
        with (data / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[name] = [file.tell(), digest]
    return found


def _finish(path: Path, body: dict[str, Any]) -> None:
    sync_folder(path / body["data"])
    sync_folder(path)
    text = json.dumps(body, separators=(",", ":")).encode()
    first = b"%s %d %s\n" % (_FIRST_WORDS, VERSION, hashlib.sha256(text).hexdigest().encode())
    with replaced(path / MARKER) as file:
        file.write(first + text)
    _remove_data(path, kept=body["data"])


def _remove_data(path: Path, kept: str | None) -> None:
    for one in path.iterdir():
        if _FOLDER.fullmatch(one.name) and one.name != kept:
            shutil.rmtree(one, ignore_errors=True)


# ---- reading


def _read_marker(marker: Path) -> dict[str, Any]:
    first, _, text = marker.read_bytes().partition(b"\n")
    words = first.removeprefix(_FIRST_WORDS).split()
    if not first.startswith(_FIRST_WORDS) or len(words) != 2:
        raise damaged(marker, "its first line is not that of a checkpoint")
    version, digest = (word.decode("latin-1") for word in words)
    if version.isdecimal() and int(version) > VERSION:
        raise newer(marker, version)
    found = hashlib.sha256(text).hexdigest()
    exact = first == b"%s %d %s" % (_FIRST_WORDS, VERSION, found.encode())
    if not exact:
        raise damaged(marker, f"its SHA-256 is {found}, and it says {digest} in version {version}")
    body: dict[str, Any] = json.loads(text)
    return body
