"""One JSON file for each piece of `make gpu`, written after every step: a killed piece keeps what it had."""

import json
import os
import time
from pathlib import Path

ATTEMPTS = 2


def piece_of_file(path: str) -> str:
    """Return the piece of a test file with this path, in POSIX spelling."""
    for part, piece in (("/verify/", "compare"), ("test_compile", "compile"), ("test_distributed", "ranks")):
        if part in path:
            return piece
    return "correct"


class Record:
    """The steps of a piece: outcome ("passed", "failed", "skipped", "stopped"), seconds, reason, figures.

    A step without an outcome was running when its process was killed. It is tried again after the steps that
    have not run, and so is one that failed, since its cause may be mended: ATTEMPTS times in all.
    """

    def __init__(self, path: Path, piece: str, on: dict[str, object]) -> None:
        self.path = path
        self.data = {"piece": piece, "on": on, "complete": False, "steps": {}}
        if path.exists():
            self.reload()
            if not same_machine(self.data["on"], on):
                raise SystemExit(
                    f"{path} holds results of {_words(self.data['on'])}, and this is {_words(on)}: "
                    "choose another folder with RESULTS=DIR"
                )

    def reload(self) -> None:
        """Read what is on disk, which another process may have written."""
        try:
            self.data = json.loads(self.path.read_text(encoding="utf-8"))
        except ValueError as wrong:
            raise SystemExit(f"{self.path} is no JSON ({wrong}): delete it to run the piece again") from None

    @property
    def steps(self) -> dict[str, dict[str, object]]:
        return self.data["steps"]

    def to_run(self, names: list[str]) -> list[str]:
        """Return the names that have not run, then those to be tried again."""
        new = [name for name in names if name not in self.steps]
        return new + [name for name in names if name in self.steps and not self._ended(name)]

    def _ended(self, name: str) -> bool:
        if name == "tests":
            return self.steps[name].get("outcome", "stopped") != "stopped" and all(
                self._ended(test) for test in self.steps if "::" in test
            )
        step = self.steps[name]
        return step.get("outcome", "stopped") not in ("stopped", "failed") or step["attempts"] >= ATTEMPTS

    def start(self, name: str) -> None:
        attempts = self.steps.get(name, {}).get("attempts", 0) + 1
        self.steps[name] = {"attempts": attempts, "started": time.strftime("%Y-%m-%dT%H:%M:%S")}
        self.save()

    def end(self, name: str, outcome: str, **values: object) -> None:
        """``values``: seconds, why, and whatever the step measured, each figure with its unit in its name."""
        self.steps[name] = {"attempts": 1} | self.steps.get(name, {}) | {"outcome": outcome} | values
        self.save()

    def finish(self, names: list[str]) -> None:
        left = [name for name in self.to_run(names) if self.steps.get(name, {}).get("outcome") != "failed"]
        self.data["complete"] = not left
        self.save()

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = self.path.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        os.replace(written, self.path)


def same_machine(one: dict[str, object], other: dict[str, object]) -> bool:
    return all(one[key] == other[key] for key in ("device", "torch", "python"))


def _words(on: dict[str, object]) -> str:
    return f"{on['device']} with torch {on['torch']} and Python {on['python']}"
