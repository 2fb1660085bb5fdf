"""A script that is ended after so many steps ends as one that calls ``sys.exit(0)``, or by force."""

import textwrap
import threading

import pytest
import torch

from narrowcast.attach import Attachment
from narrowcast.capture import read_capture

TRAINING = """\
    import atexit, os, sys, threading, time
    import torch
    from torch import nn

    torch.set_num_threads(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.ones(8, 4)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    """


def script(*texts):
    return "\n".join(textwrap.dedent(text) for text in texts)


def assert_stopped(ended, steps):
    assert (ended.code, ended.stderr) == (0, "")
    end = ended.capture.end
    assert (end["exit_code"], end["stopped"]) == (0, True)
    assert end["steps"] + end["skipped_steps"] == steps
    assert len(ended.capture.of("step")) == steps
    assert ended.at_end_was_called


def test_a_script_that_imports_apex_is_told_what_runs_it(runs):
    for text, told in ("import apex", True), ("from apex import amp", True), ("import apexes", False):
        ended = runs.run(text)
        assert ended.code == 1
        last = ended.stderr.splitlines()[-1]
        assert last.startswith("narrowcast: python -m narrowcast.apex SCRIPT runs scripts") == told


def test_it_ends_as_a_script_that_exits(runs):
    """What is open is closed, ``finally`` and ``with`` are left, and exit handlers are called."""
    ended = runs.run(
        script(
            TRAINING,
            """
            from contextlib import contextmanager

            @contextmanager
            def managed():
                try:
                    yield
                finally:
                    print("left the context")

            atexit.register(lambda: print("at exit"))
            log = open("log.txt", "w")
            try:
                with managed():
                    for n in range(1000):
                        log.write(f"{n}\\n")
                        step()
            except Exception:
                print("an Exception")
            finally:
                print("finally")
            print("never")
            """,
        ),
        stop_after=5,
    )
    assert ended.lines == ["left the context", "finally", "at exit"]
    assert (runs.work / "log.txt").read_text() == "0\n1\n2\n3\n4\n"
    assert_stopped(ended, 5)


BY_FORCE = {
    "swallows everything": """
        while True:
            try:
                step()
            except BaseException:
                time.sleep(0.01)
        """,
    "waits at exit": """
        atexit.register(time.sleep, 1000)
        while True:
            step()
        """,
    "a thread never ends": """
        def serve():
            while True:
                time.sleep(1)
        threading.Thread(target=serve).start()
        while True:
            step()
        """,
}


@pytest.mark.parametrize("how", BY_FORCE)
def test_a_script_that_does_not_end_is_ended_by_force(runs, how):
    ended = runs.run(script(TRAINING, "print('begins')", BY_FORCE[how]), stop_after=5, patience_s=0.3)
    assert (ended.code, ended.lines, ended.stderr) == (0, ["begins"], "")
    assert ended.capture.end["stopped"]
    assert ended.at_end_was_called


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_a_process_that_trains_is_ended_too(runs, start):
    """The end of a forked child is not that of its parent."""
    ended = runs.run(
        script(
            TRAINING,
            f"""
            import multiprocessing

            def train():
                for n in range(1000):
                    step()

            if __name__ == "__main__":
                child = multiprocessing.get_context("{start}").Process(target=train)
                child.start()
                child.join()
                print("ended with", child.exitcode, os.path.exists(os.path.join(sys.argv[1], "at_end")))
            """,
        ),
        str(runs.work.parent / "run-1"),
        stop_after=5,
    )
    assert (ended.code, ended.lines) == (0, ["ended with 0 False"])
    assert ended.at_end_was_called
    if start != "fork":
        end = read_capture(ended.folder / "capture-process0.jsonl").end
        assert (end["exit_code"], end["stopped"], end["steps"]) == (0, True, 5)


def stopped(train, policy, stop_after, **settings):
    """The facts of a training in this process, which is to raise SystemExit."""
    attached = Attachment(policy, stop_after=stop_after, **settings)
    with pytest.raises(SystemExit), attached:
        train(torch.nn.Linear(4, 1), torch.ones(8, 4))
    assert attached.facts["stopped"]
    return attached.facts


def several_optimizers(model, x):
    optimizers = [torch.optim.SGD(model.parameters(), 0.01), torch.optim.Adam(model.parameters())]
    while True:
        model(x).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        self.inner.step()
        self.inner.step()


def steps_inside_a_step(model, x):
    ahead = Lookahead(torch.optim.SGD(model.parameters(), 0.01))
    while True:
        model(x).sum().backward()
        ahead.step()


def steps_in_hooks_of_backward(model, x):
    parts = {p: torch.optim.SGD([p], 0.01) for p in model.parameters()}

    def step(p):
        parts[p].step()
        p.grad = None

    for p in parts:
        p.register_post_accumulate_grad_hook(step)
    while True:
        model(x).sum().backward()


def skipped_steps(model, x):
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    while True:
        (model(x).sum() * float("inf")).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "train",
    [several_optimizers, steps_inside_a_step, steps_in_hooks_of_backward, skipped_steps],
)
def test_outermost_steps_count(train):
    skips = train is skipped_steps
    facts = stopped(train, "fp16" if skips else "fp32", stop_after=6)
    assert (facts["steps"], facts["skipped_steps"]) == ((0, 6) if skips else (6, 0))


def updates_by_hand(model, x):
    model(x).sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(1e-4 * p.grad)
            p.grad = None


def gradients_of_an_image(model, x):
    x.requires_grad_()
    model(x).sum().backward()


def outputs(model, x):
    with torch.no_grad():
        model(x)


@pytest.mark.parametrize("once", [updates_by_hand, gradients_of_an_image, outputs])
def test_without_an_optimizer_backwards_or_calls_count(once):
    done = []

    def train(model, x):
        while True:
            once(model, x)
            done.append(once)

    stopped(train, "bf16", stop_after=5)
    assert len(done) == 4  # the fifth does not return


def test_calls_before_training_are_no_steps_of_a_script_that_is_known_to_train():
    """As those of a parametrization, or an evaluation at the start."""

    def train(model, x):
        for _ in range(5):
            model(x)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        while True:
            model(x).sum().backward()
            optimizer.step()

    assert stopped(train, "bf16", stop_after=3)["steps"] == 0
    assert stopped(train, "bf16", stop_after=3, is_training=True)["steps"] == 3


@pytest.mark.long
def test_a_compiled_training_step_is_ended_after_backwards(runs):
    ended = runs.run(
        script(
            TRAINING,
            """
            compiled = torch.compile(step, backend="eager")
            for n in range(1000):
                compiled()
            """,
        ),
        stop_after=5,
    )
    assert ended.code == 0, ended.stderr
    assert ended.capture.end["stopped"]
    assert 4 <= ended.capture.end["backwards"] <= 8


def test_a_process_that_goes_on_after_a_stop_is_not_ended_later():
    stopped(several_optimizers, "bf16", stop_after=1)
    waiting = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    for thread in waiting:
        thread.join(5)
    assert not any(thread.is_alive() for thread in waiting)
