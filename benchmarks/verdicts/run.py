"""Whether ``narrowcast compare`` answers rightly, and alike each time: ``make verdicts``.

Compares programs whose answer is known, as often as asked. Those of ``equal.py`` train as well in bf16 as in
fp32, so that "right" must never be "no"; those of ``spoiled.py`` do not, so that it must never be "yes"; and
no script may get "yes" one time and "no" another. With ``--busy`` two busy loops run beside each comparison.
Prints a line for each comparison, then how often each answer was given, and returns 1 if one was false.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from equal import PROGRAMS
from spoiled import FORMATS, SABOTAGES

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples"
GALLERY = {
    "digits": ["digits.py", "--epochs", "4"],
    "transformers_digits": ["transformers_digits.py"],
    "transformers_text": ["transformers_text.py"],
    "quantized_sine": ["quantized_sine.py"],
    "segment_recurrence": ["segment_recurrence/main.py"],
    "speech_style": ["speech_style/main.py"],
}
ANSWERS = ("yes", "no", "cannot tell")
BUSY_LOOPS = 2


def commands(kinds: list[str]) -> dict[str, list[str]]:
    """The words after ``narrowcast compare`` for each program of some kinds."""
    found: dict[str, list[str]] = {}
    if "gallery" in kinds:
        for name, (script, *arguments) in GALLERY.items():
            found[name] = ["-p", "bf16", str(EXAMPLES / script), *arguments]
    if "equal" in kinds:
        for name in PROGRAMS:
            found[name] = ["-p", "bf16", str(HERE / "equal.py"), name]
    if "spoiled" in kinds:
        for name in (*SABOTAGES, *FORMATS):
            format_ = "fp16" if name == "fp16_overflow" else "bf16"
            found[name] = ["-p", format_, str(HERE / "spoiled.py"), name]
    return found


@contextlib.contextmanager
def busy_loops(count: int):
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def compare(words: list[str]) -> dict[str, str]:
    """Both answers of one comparison, in whole."""
    command = [sys.executable, "-m", "narrowcast", "compare", "--json", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode not in (0, 1):
        return {"right": f"error: {ended.stderr.strip()[-300:]}", "worth_it": ""}
    return json.loads(ended.stdout)["verdict"]


def short(answer: str) -> str:
    return next((word for word in ANSWERS if answer.startswith(word)), "error")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=["equal", "spoiled"], help="gallery, equal, spoiled")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--busy", action="store_true", help=f"beside {BUSY_LOOPS} busy loops")
    options = parser.parse_args()

    right: dict[str, Counter[str]] = {}
    worth_it: dict[str, Counter[str]] = {}
    programs = commands(options.kinds)
    began = time.monotonic()
    for number in range(options.rounds):
        for name, words in programs.items():
            began_one = time.monotonic()
            with busy_loops(BUSY_LOOPS * options.busy):
                verdict = compare(words)
            right.setdefault(name, Counter())[short(verdict["right"])] += 1
            worth_it.setdefault(name, Counter())[short(verdict["worth_it"])] += 1
            took_s = time.monotonic() - began_one
            print(f"{number + 1} {name:20} {took_s:3.0f} s  right: {verdict['right']}", flush=True)
            print(f"{'':30} worth it: {verdict['worth_it']}", flush=True)

    print(f"\n{'program':20} {'right':30} worth it   ({time.monotonic() - began:.0f} s)")
    faults = 0
    for name in programs:
        false = (name in PROGRAMS and right[name]["no"]) or (
            name not in PROGRAMS and name not in GALLERY and right[name]["yes"]
        )
        both = min(right[name]["yes"], right[name]["no"]) or min(worth_it[name]["yes"], worth_it[name]["no"])
        is_fault = bool(false or both or right[name]["error"])
        faults += is_fault
        counts = [
            ", ".join(f"{word} {count}" for word, count in answers[name].items())
            for answers in (right, worth_it)
        ]
        print(f"{name:20} {counts[0]:30} {counts[1]}{'  FALSE' if is_fault else ''}")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
