"""Folders as ``narrowcast compare`` and ``narrowcast run`` leave them, made up: no script runs, no torch."""

import json
import math
import random
from pathlib import Path

from narrowcast.capture._events import SCHEMA
from narrowcast.report import find_capture, save_page

STARTED = 1_790_000_000.0
VERSIONS = {"narrowcast": "0.1.0", "torch": "2.13.0", "python": "3.11.9", "platform": "Linux x86_64"}
SETTINGS = {"allow_tf32_matmul": False, "allow_tf32_cudnn": True, "deterministic_algorithms": False}
BREAKS_OUT = "</script><script>window.hacked=1</script>"
TEMPLATE = "{{7*7}}{% for x in range(9) %}x{% endfor %}"
IMAGE = "<img src=x onerror=window.hacked=1>"
HOSTILE = f"{BREAKS_OUT}{TEMPLATE}{IMAGE}<a href='javascript:window.hacked=1'>x</a>\u202e\x1b[31m\x00\u2028"


def squeezed(text):
    """The rows of a table word by word: how wide columns are is the business of rich."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip(" -\u2500")]


def write_lines(path, *events):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def write_page(folder):
    return save_page(find_capture(folder))


def altered(events, kind, field, value):
    """The events with another value of a field in those of one kind."""
    return [event | {field: value} if event["event"] == kind else event for event in events]


def start(kind="run", **changed):
    event = {"event": "start", "schema": SCHEMA, "kind": kind, "argv": ["train.py", "--epochs", "3"]}
    more = {"loss_scale": None, "seed": 0}
    more |= {"steps": 0, "repeats": 3, "at_step": 10} if kind == "compare" else {"rank": 0}
    return {**event, "policy": "bf16", "started": STARTED, **more, **changed}


def device(format_="bf16"):
    because = {"bf16": "this GPU computes in bf16", "fp32": "the policy is fp32"}[format_]
    return {"event": "device", "device_type": "cuda", "format": format_, "because": because}


def end(**changed):
    ended = {"event": "end", "exit_code": 0, "stopped": False, "left_alone": None, "wall_s": 41.3}
    counts = {"backwards": 300, "forwards": 310, "steps": 300, "skipped_steps": 0, "final_scale": None}
    peaks = {"peak_resident_bytes": 812 * 2**20, "peak_tensor_bytes": None}
    return ended | counts | peaks | {"settings": SETTINGS, "versions": VERSIONS} | changed


def training(
    seed, *, mixed, steps=300, sites=("train.py:41",), step_s=0.0123, scale=None, diverges=None, cut=False
):
    """The events of a run that trains; ``diverges``: the step from which its losses are NaN."""
    draw = random.Random(1000 * seed + mixed)
    noise = random.Random(seed)
    events = [start(seed=seed, policy="bf16" if mixed else "fp32"), device("bf16" if mixed else "fp32")]
    now, backward, skipped = 0.4, 0, 0
    for step in range(1, steps + 1):
        lasts = step_s / (1.62 if mixed else 1) * draw.lognormvariate(0, 0.06)
        lasts *= 3 if draw.random() < 0.02 or step < 4 else 1
        now += lasts
        for place, site in enumerate(sites):
            backward += 1
            value = (2.3 - 0.4 * place) * math.exp(-step / 70) + 0.09 + 0.06 * abs(noise.gauss(0, 1))
            value *= 1 + 0.004 * draw.gauss(0, 1) * mixed
            if diverges is not None and step >= diverges:
                value = "nan" if step > diverges else "inf"
            loss = {"event": "loss", "time_s": now, "backward": backward, "site": site, "value": value}
            events.append(loss)
        skip = scale is not None and mixed and (step < 5 or step in (120, 121) or step % 97 == 0)
        skipped += skip
        if scale is not None and mixed:
            scale = scale / 2 if skip else scale * 2 if step % 60 == 0 else scale
        times = {"time_s": now, "interval_s": None if step == 1 else lasts, "backward": backward}
        settings = {"optimizer": 0, "skipped": skip, "scale": scale if mixed else None}
        events.append({"event": "step", **times, **settings})
    peak = (5.4 if mixed else 8.1) * 2**30
    counts = {"steps": steps - skipped, "skipped_steps": skipped, "backwards": backward, "wall_s": now + 2}
    peaks = {"peak_tensor_bytes": int(peak), "peak_resident_bytes": (812 if mixed else 790) * 2**20}
    return events if cut else [*events, end(final_scale=scale if mixed else None, **counts, **peaks)]


def losses_of_a_run(losses):
    """The events of a run that went backward from ``losses`` and took a step after each."""
    events = [start(), device()]
    for number, value in enumerate(losses):
        now = float(number)
        events.append(
            {"event": "loss", "time_s": now, "backward": number + 1, "site": "train.py:9", "value": value}
        )
        step = {"optimizer": 0, "skipped": False, "scale": None, "backward": number + 1}
        events.append({"event": "step", "time_s": now, "interval_s": 0.01, **step})
    return [*events, end(steps=len(losses), backwards=len(losses))]


def computing(seed, *, mixed, calls=200):
    """The events of a run that only computes."""
    draw = random.Random(1000 * seed + mixed)
    now = 0.2
    events = [start(seed=seed, argv=["infer.py"]), device("bf16" if mixed else "fp32")]
    for _ in range(calls):
        lasts = (0.0041 if mixed else 0.0074) * draw.lognormvariate(0, 0.09)
        now += lasts + 0.001
        events.append(
            {"event": "forward", "time_s": now, "duration_s": lasts, "gradients": False, "training": False}
        )
    return [*events, end(steps=0, backwards=0, forwards=calls, peak_tensor_bytes=(3 - mixed) * 10**8)]


def parameter(name, ratio, *, judged=True, reason=None):
    norms = {"gradient_norm": 0.81, "error_norm": 0.003, "noise_norm": 0.4, "rounding_norm": 1e-7}
    errors = {"error_over_noise": ratio, "relative_error": 0.004, "cosine": 0.99999}
    judgement = {"judged": judged, "lost": False, "reason": reason}
    return {"name": name, "shape": [64, 64], **norms, **errors, **judgement}


def certificate(count=14, *, names=None, **changed):
    draw = random.Random(count)
    names = names or [f"blocks.{n // 4}.{('qkv', 'proj', 'up', 'down')[n % 4]}.weight" for n in range(count)]
    parameters = [parameter(name, 0.006 * draw.lognormvariate(0, 0.6)) for name in names]
    if count > 5 and len(names) > 5:
        reason = "its gradient is rounding noise in FP32 itself, as that of a bias before a batch norm is"
        parameters[5] = parameter(names[5], 595.0, judged=False, reason=reason)
    worst = max((p for p in parameters if p["judged"]), key=lambda p: p["error_over_noise"])
    numbers = {"error_over_noise": 0.0071, "relative_error": 0.0034, "cosine": 0.999994}
    made = {"event": "certificate", "policy": "bf16", "format": "bf16", "at_step": 10, "loss_scale": None}
    verdict = {"verdict": "pass", "reason": "below 0.05 for all parameters together and for each"}
    worst = {key: worst[key] for key in ("name", "error_over_noise", "relative_error")}
    more = {"error_over_noise_interval": None, "is_lost": changed.get("verdict") == "fail"}
    return {
        **made, **numbers, **more, "worst_parameter": worst, "parameters": parameters, **verdict, **changed
    }  # fmt: skip


def output(**changed):
    found = {"event": "output", "relative_error": 0.0031, "sqnr_db": 50.2, "calls": 200, "verdict": "pass"}
    return {**found, "reason": "below 0.05 in every call", **changed}


def note(text):
    return {"event": "note", "text": text}


def in_turns(events, steps=1):
    """The events of a run that took turns with another one, in blocks of so many steps or calls."""
    pause = {"event": "pause", "time_s": 0.0, "waited_s": 0.0}
    found, count = [], 0
    for event in events:
        found.append(event)
        if event["event"] in ("step", "forward"):
            count += 1
            if count % steps == 0:
                found.append(pause)
    return found


def comparison(folder, events_of_runs, *own, finished=True, **started):
    """Write a comparison: ``events_of_runs`` maps names such as ``fp32-0`` to events of a run."""
    folder = Path(folder)
    runs = []
    for name, events in events_of_runs.items():
        write_lines(folder / name / "capture.jsonl", *events)
        format_, _, seed = name.partition("-")
        event = {"event": "run", "name": name, "format": format_, "seed": int(seed)}
        runs.append(event | {"capture": f"{name}/capture.jsonl", "last_line": "test accuracy 0.981"})
    lines = [start("compare", **started), *runs, *own]
    write_lines(folder / "comparison.jsonl", *lines, *([{"event": "finished", "wall_s": 251.7}] * finished))
    return folder


def both(seeds, make, **settings):
    """Runs of both formats for each seed, in the order in which ``compare`` makes them."""
    return {
        f"{format_}-{seed}": make(seed, mixed=format_ == "mixed", **settings)
        for seed in seeds
        for format_ in ("fp32", "mixed")
    }


def trained(folder, **settings):
    return comparison(folder, both(range(3), training, **settings), certificate())


def gan(folder):
    sites = ("/home/someone/gan/train.py:88", "/home/someone/gan/train.py:97")
    more = note("the script draws random numbers on the CPU")
    return comparison(folder, both(range(3), training, sites=sites), certificate(60), more)


def inference(folder):
    return comparison(folder, both(range(3), computing), output(), argv=["infer.py"])


def fp16(folder):
    """Skips, a scale that moves, and losses that become NaN in mixed precision alone."""
    runs = both(range(3), training, scale=65536.0)
    runs["mixed-1"] = training(1, mixed=True, scale=65536.0, diverges=210)
    verdict = {"error_over_noise": 2.19, "verdict": "fail", "reason": "2.19 is above 0.05"}
    failed = certificate(policy="fp16", format="fp16", **verdict)
    return comparison(folder, runs, failed, policy="fp16", loss_scale="dynamic")


def many_parameters(folder, count=300):
    return comparison(folder, both(range(3), training), certificate(count))


def killed(folder):
    """Killed in the middle of its second mixed run's line."""
    runs = both(range(2), training)
    runs["mixed-1"] = training(1, mixed=True, steps=77, cut=True)
    folder = comparison(folder, runs, finished=False)
    for path in (folder / "comparison.jsonl", folder / "mixed-1" / "capture.jsonl"):
        with path.open("a") as file:
            file.write('{"event": "loss", "time_s": 1.0, "ba')
    return folder


def hostile(folder):
    """Every text is an attack, and numbers are not finite."""
    long = HOSTILE + "n" * 10_000
    runs = both(range(3), training, steps=40, sites=(HOSTILE, "\u05d0\u05d1" * 50))
    for seed, value in enumerate(("inf", -0.0, "nan")):
        for name in (f"fp32-{seed}", f"mixed-{seed}"):
            events = runs[name]
            events[1] = {**device(), "device_type": HOSTILE, "format": HOSTILE, "because": HOSTILE}
            events[2]["value"] = value
            events[-1]["versions"] = {HOSTILE: HOSTILE, "torch": "\ud800"}
            events[-1]["settings"] = {HOSTILE: True, "x": HOSTILE}
            events.insert(-1, note(HOSTILE))
    names = [long, HOSTILE, TEMPLATE, IMAGE, BREAKS_OUT, "\u202ereversed", "", "%{x}<b>bold</b>"]
    found = certificate(len(names), names=names, reason=HOSTILE, policy=HOSTILE, format=HOSTILE)
    found["parameters"][0] |= {"error_over_noise": "nan", "cosine": "nan", "relative_error": "inf"}
    found["parameters"][2] |= {"error_over_noise": 0.0}
    found["parameters"][3] |= {"error_over_noise": "inf", "reason": HOSTILE}
    argv = ["train.py", HOSTILE, long]
    folder = comparison(folder, runs, found, note(long), argv=argv, policy=HOSTILE, loss_scale=HOSTILE)
    path = folder / "comparison.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    attack = {"name": HOSTILE, "last_line": HOSTILE}
    write_lines(path, *(event | (attack if event["event"] == "run" else {}) for event in events))
    return folder


def one_run(folder, **settings):
    """What ``narrowcast run`` leaves."""
    write_lines(Path(folder) / "capture.jsonl", *training(0, mixed=True, **settings))
    return Path(folder)


def site(path, op, inputs, computes, outputs, **changed):
    """Calls of one operator, as ``narrowcast explain`` tells of them."""
    return {
        **{
            "event": "site",
            "root": "Net" if path is not None else "",
            "path": path or "",
            "phase": "forward",
        },
        **{"op": op, "within": [], "calls": 2, "casts": 0, "cast_bytes": 0, "duration_s": 0.002},
        "kind": "product" if op in ("linear", "mm", "bmm") else "other",
        "inputs": inputs.split("+") if inputs else [],
        "computes": computes,
        "outputs": outputs.split("+") if outputs else [],
        "because": "PyTorch's table for cuda" if computes else "unlisted: in the formats that come",
        "rule": None,
        "listed": computes is not None,
        **changed,
    }


def watched(**changed):
    run = {
        "event": "watched",
        "unit": "step",
        "steps": 2,
        "complete": True,
        "device": "cuda",
        "format": "bf16",
    }
    counts = {"ops": 800, "casts": 96, "moved_bytes": 64 * 2**20, "cast_bytes": 8 * 2**20}
    times = {"duration_s": 0.1, "cast_s": 0.012, "product_s": 0.05, "narrow_product_s": 0.049}
    rules = ["softmax: fp16", "mm: fp16", "conv2d: fp32"]
    return run | counts | times | {"rules": rules, "versions": VERSIONS | {"gpu": "Some GPU"}} | changed


def explained_events(blocks=3, **changed):
    """What ``narrowcast explain`` keeps of a small transformer on a GPU."""
    start_of = start("explain", argv=["train.py", "--epochs", "3"])
    sites = [site("emb", "embedding", "fp32", None, "fp32")]
    for number in range(blocks):
        path = f"blocks.{number}"
        given = "fp32" if number == 0 else "fp32+bf16"
        times = {"casts": 6, "cast_bytes": 300_000, "duration_s": 0.01}
        sites += [
            site(f"{path}.norm", "layer_norm", given, "fp32", "fp32", casts=2, cast_bytes=1200),
            site(f"{path}.qkv", "linear", "fp32", "bf16", "bf16", **times),
            site(path, "softmax.int", "bf16", "fp16", "fp16", rule="softmax: fp16", because="softmax: fp16"),
            site(path, "view", "bf16", None, "bf16", kind="view"),
            site(path, "bmm", "fp16", "bf16", "bf16", within=["einsum"], casts=2, cast_bytes=4096),
        ]
    outside = {"phase": "outside", "because": "outside of every region"}
    sites += [
        site(None, "_log_softmax", "fp32", None, "fp32", **outside),
        site(None, "mm", "bf16", None, "bf16", phase="backward", because="backward", duration_s=0.02),
        site(None, "addcdiv_", "fp32", None, "fp32", phase="optimizer", because="outside of every region"),
    ]
    why = "mm runs only inside linear, which is decided about as a whole: a rule for linear reaches it"
    unreached = {"event": "unreached", "rule": "mm: fp16", "reason": why}
    uncalled = {"rule": "conv2d: fp32", "reason": "conv2d was not called"}
    return [start_of, *sites, unreached, unreached | uncalled, watched(**changed)]


def explained_run(folder, events=None):
    """What ``narrowcast explain`` leaves: the capture of a short run, and what ran in which format."""
    write_lines(Path(folder) / "capture.jsonl", *training(0, mixed=True, steps=3))
    write_lines(Path(folder) / "explain.jsonl", *(explained_events() if events is None else events))
    return Path(folder)


def hostile_explanation(folder):
    """Every text of it is an attack."""

    def attack(value):
        if isinstance(value, str):
            return HOSTILE
        if isinstance(value, list):
            return [attack(item) for item in value]
        return value

    fixed = ("event", "phase", "kind", "unit", "schema", "versions")
    events = [
        {name: value if name in fixed else attack(value) for name, value in event.items()}
        for event in explained_events()
    ]
    events[0]["kind"] = "explain"
    return explained_run(folder, [*events, note(HOSTILE)])
