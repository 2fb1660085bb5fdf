"""Whether mixed precision is right, by gradients at several steps and by losses, as docs/compare.md says."""

import shlex
from pathlib import Path

import made_captures
import pytest

from narrowcast.capture import read_comparison
from narrowcast.report import summary
from narrowcast.report._right import judge_gradients, next_for_right, next_for_speed

START = {"argv": ["train.py", "--lr", "0.1"], "policy": "bf16", "repeats": 1, "steps": 200, "options": []}


def at(step, verdict, error=0.01, interval=None, *, is_lost=False):
    interval = interval or [error / 2, 2 * error]
    reason = f"The error is {error}."
    numbers = {"error_over_noise": error, "error_over_noise_interval": interval}
    return {"at_step": step, "verdict": verdict, "is_lost": is_lost, "reason": reason, **numbers}


GRADIENTS = {
    "pass": [at(0, "pass"), at(8, "pass"), at(32, "pass")],
    "cannot tell": [at(0, "pass"), at(8, "cannot tell", 0.07), at(32, "pass")],
    "fail": [at(0, "pass"), at(8, "fail", 0.11), at(32, "fail", 0.15)],
    "fail, growing": [at(0, "pass"), at(8, "fail", 0.11, [0.08, 0.14]), at(32, "fail", 0.4, [0.2, 0.8])],
    "lost": [at(0, "pass"), at(8, "pass"), at(32, "fail", 0.5, is_lost=True)],
}
LOSSES = {
    "one seed": ([1.0], [1.1]),
    "three that agree": ([1.0, 2.0, 3.0], [1.1, 2.1, 3.1]),
    "three that differ": ([1.0, 2.0, 3.0], [5.0, 6.0, 7.5]),
}


def seeds(side, losses):
    return {f"{side}-{seed}": made_captures.losses_of_a_run([loss]) for seed, loss in enumerate(losses)}


def table_of_the_documents():
    """Return the verdict of docs/compare.md by gradients and losses."""
    text = Path(__file__).parents[2].joinpath("docs/compare.md").read_text(encoding="utf-8")
    table = text[text.index("| gradients at the later steps") :].splitlines()[: 2 + len(GRADIENTS)]
    head, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {
        (row[0], losses): verdict for row in body for losses, verdict in zip(head[1:], row[1:], strict=True)
    }


@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("gradients", GRADIENTS)
def test_the_table_of_verdicts(tmp_path, gradients, losses):
    fp32, mixed = LOSSES[losses]
    events = [made_captures.certificate(**found) for found in GRADIENTS[gradients]]
    runs = seeds("fp32", fp32) | seeds("mixed", mixed)
    found = summary(read_comparison(made_captures.comparison(tmp_path, runs, *events, repeats=len(fp32))))
    assert found["verdict"]["right"].partition(":")[0] == table_of_the_documents()[gradients, losses]
    assert (found["next"]["right"] is None) == (found["verdict"]["right"] == "yes")
    assert [one["at_step"] for one in found["certificate"]["steps"]] == [0, 8, 32]
    # What is shown is of the step that decides: the verdict beside it is its own.
    decides = {"pass": 32, "cannot tell": 8, "fail": 32, "fail, growing": 32, "lost": 32}
    assert found["certificate"]["at_step"] == decides[gradients]


def test_an_early_failure_that_is_gone_is_said_as_such():
    found = judge_gradients([at(0, "fail", 0.109), at(8, "pass"), at(32, "pass")])
    assert found.state == "pass"
    assert found.early == (
        "gradients failed at step 0, the start of training, and no longer do at steps 8 and 32, which count: "
        "The error is 0.109."
    )
    assert judge_gradients([at(0, "fail", 0.109)]).state == "fail"
    assert judge_gradients(GRADIENTS["fail"]).early is None


@pytest.mark.parametrize(
    ("certificates", "state"),
    [
        ([at(0, "pass"), at(8, "fail", 0.2, [0.1, 0.4]), at(32, "fail", 0.3, [0.2, 0.5])], "fail"),  # overlap
        ([at(0, "pass"), at(8, "fail", 0.4, [0.3, 0.5]), at(32, "fail", 0.2, [0.1, 0.25])], "fail"),  # falls
        ([at(0, "pass"), at(8, "fail", 0.2), at(32, "pass")], "fail"),
        ([at(0, "pass", 0.01, [0.01, 0.02]), at(8, "fail", 0.2, [0.1, 0.4])], "fail"),  # only one later step
        ([at(100, "fail", 0.2)], "fail"),
        ([at(100, "fail", 0.2, is_lost=True)], "lost"),
        ([at(0, "fail", 0.5, is_lost=True), at(8, "pass"), at(32, "cannot tell", 0.07)], "cannot tell"),
    ],
)
def test_growing_is_by_intervals_of_the_later_steps(certificates, state):
    assert judge_gradients(certificates).state == state


def test_every_answer_but_yes_names_a_command():
    def right(text, **changed):
        return next_for_right(text, START | changed, kind="training", formats="bf16", was_stopped=True)

    assert right("yes") is None
    assert right("cannot tell: x") == "narrowcast compare --repeats 3 train.py --lr 0.1"
    long = {"kind": "training", "formats": "bf16", "was_stopped": True, "steps": 200}
    by_gradients = "cannot tell: gradients: at step 8: x"
    later = next_for_right(by_gradients, START, **long)
    assert later == "narrowcast compare --at-step 100 train.py --lr 0.1"
    at_100 = START | {"at_step": 100, "options": ["--at-step", "100"]}
    seeds = next_for_right(by_gradients, at_100, **long)
    assert seeds == "narrowcast compare --at-step 100 --repeats 3 train.py --lr 0.1"
    named = next_for_right(by_gradients, at_100 | {"repeats": 3}, **long)
    assert named == "narrowcast explain --policy bf16 train.py --lr 0.1", "more seeds cannot make it a yes"
    asked = {"repeats": 3, "options": ["--repeats", "3", "-m"]}
    assert (
        right("cannot tell: x", **asked) == "narrowcast compare --repeats 3 --steps 800 -m train.py --lr 0.1"
    )
    whole = {"repeats": 3, "steps": 0, "options": ["--repeats", "3", "--steps", "0"]}
    assert right("cannot tell: x", **whole).startswith("narrowcast compare --repeats 6 --steps 0 ")
    ended = START | {"at_step": 300, "options": ["--at-step", "300"]}
    sooner = next_for_right(by_gradients, ended, **long | {"was_stopped": False})
    assert sooner == "narrowcast compare --at-step 100 train.py --lr 0.1", "the script has 200 steps"
    again = next_for_right(by_gradients, START, **long, script_first=True)
    assert again == "narrowcast compare train.py --lr 0.1", "once the script is changed"
    assert right("no: x") == "narrowcast compare --policy safe train.py --lr 0.1"
    assert right("no: x", policy="safe") == "narrowcast explain --policy safe train.py --lr 0.1"
    for other in ("fp32", "fp16"):
        # Where "auto" is another format, "safe" says nothing of bf16.
        named = right("no: x", safe_format=other)
        assert named == "narrowcast explain --policy bf16 train.py --lr 0.1"
    low = {"options": ["--policy", "fp16", "--loss-scale", "1024"]}
    found = next_for_right("no: x", START | low, kind="training", formats="fp16", was_stopped=True)
    assert found == "narrowcast compare --policy bf16 train.py --lr 0.1"
    assert next_for_speed("yes: x", START, was_stopped=True) is None
    assert (
        next_for_speed("no: x", START, was_stopped=True)
        == "narrowcast doctor --policy bf16 train.py --lr 0.1"
    )
    longer = next_for_speed("cannot tell: x", START, was_stopped=True)
    assert longer == "narrowcast compare --steps 800 --time-limit 0 train.py --lr 0.1"
    short = next_for_speed("cannot tell: x", START, was_stopped=False)
    assert short == "narrowcast compare --repeats 3 --time-limit 0 train.py --lr 0.1", "it has no more steps"
    again = next_for_speed("cannot tell: x", START, was_stopped=True, is_busy=True)
    assert again == "narrowcast compare train.py --lr 0.1", "when others have ended"
    cut = next_for_speed("cannot tell: x", START, was_stopped=True, was_cut=True)
    assert cut == "narrowcast compare --time-limit 0 train.py --lr 0.1", "more steps would be cut too"
    three = START | {"repeats": 3, "options": ["--repeats", "3"]}
    cut = next_for_right("cannot tell: x", three, **long, was_cut=True)
    assert cut == "narrowcast compare --repeats 3 --time-limit 0 train.py --lr 0.1"
    spaced = next_for_speed("no: x", START | {"argv": ["my train.py"]}, was_stopped=True)
    assert shlex.split(spaced)[-1] == "my train.py"


def test_no_probe_is_suggested_where_a_script_trains_in_processes_of_its_own(tmp_path):
    """``doctor SCRIPT`` and ``explain`` would see no step of it, and no gradients can be compared."""
    long = {"kind": "training", "formats": "bf16", "was_stopped": True, "steps": 200, "spawns": True}
    by_gradients = "cannot tell: gradients: x"
    seeds = next_for_right(by_gradients, START, **long)
    assert seeds == "narrowcast compare --repeats 3 train.py --lr 0.1", "not --at-step"
    judged = START | {"repeats": 3, "options": ["--repeats", "3"]}
    for answer, policy in ((by_gradients, "bf16"), ("no: x", "safe")):
        again = next_for_right(answer, judged | {"policy": policy}, **long)
        assert again == "narrowcast compare --repeats 3 train.py --lr 0.1", "with certify in the script"
    assert next_for_speed("no: x", START, was_stopped=True, spawns=True) == "narrowcast doctor"
