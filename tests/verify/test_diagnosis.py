"""``diagnose`` on scripts with a known answer, and its arithmetic on profiles made by hand."""

import functools
import json
import textwrap

import pytest

from narrowcast.capture import Estimate
from narrowcast.verify import DiagnosisSettings, diagnose
from narrowcast.verify._diagnosis import side_by_side
from narrowcast.verify.runs._runs import Purpose, read_result

NO_RATES = {"devices": []}
HEAD = """\
    import torch
    from torch import nn
    """
MANY = "range(60)"
TRAINS = """\
    model = nn.Sequential(nn.Linear({wide}, {wide}), nn.ReLU(), nn.Linear({wide}, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(64, {wide})
    for _ in {many}:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
    """


def diagnosed_in(folder, *texts, policy="bf16"):
    path = folder / "train.py"
    path.write_text("".join(textwrap.dedent(text) for text in (HEAD, *texts)), encoding="utf-8")
    target = (str(path),)
    settings = DiagnosisSettings(target=target, policy=policy, folder=folder / "runs", time_limit_s=1.0)
    return diagnose(settings, NO_RATES)


@pytest.fixture
def diagnosed(tmp_path):
    return functools.partial(diagnosed_in, tmp_path)


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A script that reads in each step."""
    reading = TRAINS.format(wide=16, many="range(100)").rstrip(" ") + textwrap.indent(
        textwrap.dedent("""\
            total = loss.item()
            if loss > 1e9:
                break
            """),
        " " * 8,
    )
    return diagnosed_in(tmp_path_factory.mktemp("small"), reading)


def test_each_part_of_a_step_has_its_share(small):
    json.dumps(small, allow_nan=False)
    assert small["problem"] is None
    assert (small["device"], small["format"], small["unit"]) == ("cpu", "bf16", "step")
    for run in (small["fp32"], small["mixed"]):
        assert sum(run["shares"].values()) == pytest.approx(1)
        assert run["plain_step_s_low"] <= run["plain_step_s"] <= run["plain_step_s_high"]
    sizes = {tuple(row["shape"]): row["count"] for row in small["together"]["sizes"]}
    assert sizes == {(64, 16, 16): 2, (64, 10, 16): 3}
    formats = {run: {row["format"] for row in small[run]["products"]} for run in ("fp32", "mixed")}
    assert formats == {"fp32": {"fp32"}, "mixed": {"bf16"}}
    assert small["fp32"]["casts"]["count"] == 0
    # As in a region of torch's own: the input, two weights and two biases, the output handed on in FP32, the
    # output's gradient, and the gradients of the four parameters.
    assert small["mixed"]["casts"]["count"] == 11
    assert small["mixed"]["casts"]["weight_count"] == 4
    assert small["mixed"]["fused"] is False


def test_reads_are_counted_by_line(small):
    reads = small["mixed"]["reads"]
    counts = {(row["what"], row["count"] / reads["steps"]) for row in reads["sites"]}
    assert counts == {("item()", 1), ("bool()", 1)}
    lines = {row["what"]: row["site"].rpartition(":")[2] for row in reads["sites"]}
    assert lines == {"item()": "11", "bool()": "12"}


def test_lazy_weights_are_known_once_they_have_values(runs):
    text = """
        import torch
        net = torch.nn.Sequential(torch.nn.LazyLinear(16), torch.nn.Linear(16, 1))
        net(torch.ones(4, 8))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(30):
            net(torch.ones(4, 8)).sum().backward()
            optimizer.step()
    """
    result = read_result(runs(text).start("mixed", "mixed", Purpose.PROFILE))
    assert result["profile"]["casts"]["weight_count"] == 4


@pytest.mark.long
def test_a_script_that_only_computes_is_profiled_by_calls(diagnosed):
    found = diagnosed(
        """\
        model = nn.Linear(64, 32)
        with torch.no_grad():
            for _ in range(40):
                model(torch.ones(16, 64))
        """
    )
    assert found["problem"] is None
    assert found["unit"] == "call"
    (size,) = found["together"]["sizes"]
    assert (size["shape"], size["count"]) == ([16, 32, 64], 1)
    assert found["mixed"]["casts"]["count"] == 4  # input, weight, bias, and the output back


@pytest.mark.long
def test_calls_before_the_optimizer_is_made_are_no_steps(diagnosed):
    looks_first = "nn.Linear(16, 16)(torch.ones(4, 16))\n"
    low = "    model[0].a_low_weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))\n"
    loop = TRAINS.format(wide=16, many=MANY)
    found = diagnosed(looks_first, loop.replace("    optimizer =", low + "    optimizer =", 1))
    assert found["unit"] == "step"
    (said,) = [note for note in found["mixed"]["notes"] if note.startswith("SGD")]
    assert "stored in bf16, without fp32 masters" in said
    assert found["mixed"]["casts"]["count"] == 11


@pytest.mark.long
def test_two_optimizers_step_in_one_step(diagnosed):
    found = diagnosed(
        TRAINS.format(wide=16, many="range(40)").replace(
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)",
            "    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.01)\n"
            "    other = torch.optim.SGD(model[2].parameters(), lr=0.01)",
        )
        + "    other.step()\n"
    )
    assert found["problem"] is None
    assert sum(row["count"] for row in found["together"]["sizes"]) == 5


@pytest.mark.long
def test_a_closure_of_a_step_is_no_part_of_the_optimizer(diagnosed):
    found = diagnosed(
        """\
        model = nn.Sequential(nn.Linear(512, 512), nn.GELU())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        inputs = torch.randn(1024, 512)
        def closure():
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            return loss
        for _ in range(40):
            optimizer.step(closure)
        """
    )
    # GELU and the loss have 524,288 values each, forward and backward; the step adds to 262,656.
    for run in (found["fp32"], found["mixed"]):
        assert run["shares"]["other_ops"] > run["shares"]["optimizer"]


PROBLEMS = {
    "short": (
        TRAINS.format(wide=16, many="range(4)"),
        "the script ended after 4 optimizer steps, and 5 are needed: let it run longer",
    ),
    "nothing": (
        "print(torch.ones(3))\n",
        "nothing to profile: expected optimizer steps or, without an optimizer, calls of a module with "
        "parameters",
    ),
    "autocast": (
        "torch.autocast('cpu').__enter__()\n" + textwrap.dedent(TRAINS.format(wide=16, many=MANY)),
        "the script or its trainer uses autocast itself: diagnose it without that, or look at it with "
        "torch's own profiler",
    ),
    "profiler": (
        "with torch.profiler.profile():\n"
        + textwrap.indent(textwrap.dedent(TRAINS.format(wide=16, many=MANY)), "    "),
        "a profiler runs in this thread already: switch that one off",
    ),
    "processes": (
        """\
        import torch.multiprocessing as multiprocessing
        def work(rank):
            print(rank)
        if __name__ == "__main__":
            multiprocessing.spawn(work, nprocs=1)
        """,
        "the script computes in processes that it starts itself, which are not profiled",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", PROBLEMS)
def test_a_diagnosis_without_numbers_has_a_reason(diagnosed, kind):
    text, sentence = PROBLEMS[kind]
    found = diagnosed(text)
    assert found["problem"] == sentence
    assert found["together"] is None


def test_a_policy_that_changes_nothing_starts_no_run(diagnosed, tmp_path):
    found = diagnosed("raise SystemError\n", policy="fp32")
    assert found["problem"] == "mixed precision stays in fp32 here, since the policy is fp32"
    assert not (tmp_path / "runs").exists()


# ---- arithmetic


def rate(kind, shape, size, speed, format_="bf16"):
    return {
        "kind": kind,
        "shape": shape,
        "size": size,
        "format": format_,
        "speed_against_fp32": speed,
        "steady": True,
    }


RATES = [
    rate("matmul", [64, 64], "small", 2.0),
    rate("matmul", [512, 512], "medium", 3.0),
    rate("matmul", [2048, 2048], "large", 0.1, "fp16"),
    rate("matmul", [2048, 2048], "large", 4.0),
    rate("matmul_with_casts", [64, 64], "small", 0.5),
    rate("convolution", [4, 256, 28, 28], "large", 5.0),
]


SMALL = ("matmul", [64, 64, 64])
CONVOLUTION = ("convolution", [4, 256, 28, 28, 256, 256, 3, 3])
UNKNOWN = ("matmul", [64, 64, 65])


def profile(products, *, plain_s, format_="fp32"):
    rows = [
        {"kind": kind, "shape": shape, "format": format_, "count": count, "each_s": each_s, "share": 0.1}
        for (kind, shape), count, each_s in products
    ]
    bounds = {"plain_step_s_low": plain_s, "plain_step_s_high": plain_s}
    shares = dict.fromkeys(("casts", "other_ops", "optimizer", "loading", "python"), 0.12) | {"products": 0.4}
    times = {"step_s": plain_s, "plain_step_s": plain_s, **bounds}
    return {"products": rows, "shares": shares, "gpu_busy_share": None, **times}


def test_products_of_two_profiles_are_matched_by_size():
    low = [(SMALL, 2, 0.020), (CONVOLUTION, 1, 0.020), (UNKNOWN, 1, 0.02)]
    found = {
        "device": "cpu",
        "format": "bf16",
        "fp32": profile([(SMALL, 2, 0.010), (CONVOLUTION, 1, 0.060), (UNKNOWN, 1, 0.02)], plain_s=0.2),
        "mixed": profile(low, plain_s=0.1, format_="bf16"),
    }
    devices = [
        {"device_type": "cuda", "rows": [rate("matmul", [64, 64], "small", 99.0)]},
        {"device_type": "cpu", "rows": RATES},
    ]
    together = side_by_side(found, {"devices": devices}, Estimate(2.0, 1.9, 2.1))
    assert (together["speedup"], together["speedup_interval"]) == (2.0, [1.9, 2.1])
    assert (together["worth_it"], together["not_faster"]) == ("yes", None)
    assert together["products_share"] == 0.4
    assert together["products_speedup"] == pytest.approx(0.100 / 0.080)
    assert together["machine_speedup"] == pytest.approx(0.080 / (0.020 / 2 + 0.060 / 5))
    assert together["limit_here"] == pytest.approx(1 / (0.6 + 0.4 * 0.080 / 0.100))
    assert together["limit_machine"] == pytest.approx(1 / (0.6 + 0.4 * (0.022 / 0.080)))
    assert [row["speedup"] for row in together["sizes"]] == [pytest.approx(0.5), pytest.approx(3), 1.0]
    assert [row["machine_speedup"] for row in together["sizes"]] == [2.0, 5.0, None]
    assert together["machine_best"] == {"speed": 4.0, "shape": [2048, 2048]}


def test_a_product_that_only_one_run_has_is_not_compared():
    found = {
        "device": "cpu",
        "format": "bf16",
        "fp32": profile([(SMALL, 2, 0.010)], plain_s=0.2),
        "mixed": profile([(UNKNOWN, 2, 0.020)], plain_s=0.1, format_="bf16"),
    }
    together = side_by_side(found, NO_RATES, None, why_unknown="too few turns")
    assert (together["speedup"], together["worth_it"]) == (None, "cannot tell")
    assert together["why_unknown"] == "too few turns"
    assert together["products_speedup"] is None
    assert together["machine_speedup"] is None
    assert together["limit_here"] is None


def test_a_product_that_stayed_in_fp32_has_no_speed_in_the_low_format():
    sides = {name: profile([(SMALL, 2, 0.010)], plain_s=0.2) for name in ("fp32", "mixed")}
    together = side_by_side({"device": "cpu", "format": "bf16", **sides}, NO_RATES, Estimate(1.0, 0.98, 1.02))
    assert together["worth_it"] == "no"
    assert together["products_speedup"] is None
    assert "ran in FP32 under bf16 too (matmul)" in together["not_faster"]["text"]
