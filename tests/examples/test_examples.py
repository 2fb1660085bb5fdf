"""Plain FP32 examples learn what they promise; every example says how it is run and what to look at."""

import importlib.util
import re
import sys

import numpy as np
import pytest
import torch
from example_runs import EXAMPLES, run, succeeded
from matplotlib import colormaps
from matplotlib.image import imread

PLAIN = [
    EXAMPLES / name
    for name in ("digits.py", "quantized_sine.py", "transformers_digits.py", "transformers_text.py")
]
SCRIPTS = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*/main.py")]
SMALL_DIGITS = ("--epochs", "4", "--width", "16", "--batch-size", "32", "--device", "cpu")
SMALL_SINE = ("--size", "48", "--hidden", "64", "--epochs", "300", "--device", "cpu")
# Seeds 0 to 2 come to 0.009 at that size; one colour everywhere gets the target's variance, 0.11.
LARGEST_LOSS = 0.03


@pytest.fixture(scope="module")
def sine():
    """The module, without its main()."""
    spec = importlib.util.spec_from_file_location("quantized_sine_example", EXAMPLES / "quantized_sine.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", PLAIN, ids=lambda path: path.name)
def test_says_nothing_of_mixed_precision(script):
    text = script.read_text().replace("NARROWCAST_RUN_DIR", "")
    forbidden = r"\b(amp|half)\b|autocast|bfloat|bf16|fp16|float16|GradScaler|scaler|narrowcast|precision"
    assert re.findall(forbidden, text, re.IGNORECASE) == []


@pytest.mark.parametrize("name", sorted(path.relative_to(EXAMPLES).as_posix() for path in SCRIPTS))
def test_docstring_says_how_to_run_it_and_what_to_look_at(name):
    docstring = (EXAMPLES / name).read_text().split('"""')[1]
    assert f"    python examples/{name}\n" in docstring
    assert "What to look at:" in docstring


def test_digits_learns_and_says_its_accuracy_last(tmp_path):
    lines = succeeded(run("digits.py", *SMALL_DIGITS, folder=tmp_path))
    last = re.fullmatch(r"test accuracy ([01]\.\d{4})", lines[-1])
    assert last, lines[-1]
    # Seeds 0 and 1 reach 0.986 to 0.988 at this size; a tenth would be guessing.
    assert float(last[1]) >= 0.95
    assert lines[0].startswith("898 training and 899 test images, 28 steps an epoch")
    assert [line.split("  ")[0] for line in lines[1:-1]] == [f"epoch {n}/4" for n in (1, 2, 3, 4)]
    assert list(tmp_path.iterdir()) == []


def test_digits_repeats_itself_and_heeds_its_seed(tmp_path):
    options = ("--epochs", "1", "--width", "8", "--device", "cpu")

    def losses(seed: str) -> list[str]:
        lines = succeeded(run("digits.py", *options, "--seed", seed, folder=tmp_path))
        return [re.sub(r"\d+\.\d+ s$", "", line) for line in lines[1:]]

    assert losses("3") == losses("3")
    assert losses("3") != losses("4")


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("digits.py", ("--batch-size", "899"), "--batch-size 899 is more than the 898 training images\n"),
        (
            "quantized_sine.py",
            ("--frequency", "0", "0"),
            "frequency (0.0, 0.0) is constant on this grid: expected one that varies on it\n",
        ),
    ],
)
def test_refuses_what_it_cannot_run(script, options, message, tmp_path):
    done = run(script, *options, "--device", "cpu", folder=tmp_path)
    assert done.returncode != 0
    assert done.stderr.endswith(message)
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def small_sine(tmp_path_factory):
    """One run in an empty folder, told to leave its picture in a folder that does not exist yet."""
    folder = tmp_path_factory.mktemp("sine")
    there = folder / "a run" / "of mine"
    done = run("quantized_sine.py", *SMALL_SINE, folder=folder, NARROWCAST_RUN_DIR=str(there))
    return folder, there / "quantized_sine.png", succeeded(done)


def test_sine_learns_and_says_its_loss_last(small_sine):
    _, path, lines = small_sine
    assert lines[0] == "48 by 48 pixels, 4 levels, 2 hidden layers of 64, 300 epochs, device cpu, seed 0"
    picture, took, final = lines[-3:]
    assert picture == f"picture {path}"
    assert re.fullmatch(r"training took \d+\.\d s", took)
    last = re.fullmatch(r"final loss (\d\.\d{4})", final)
    assert last, final
    assert float(last[1]) < LARGEST_LOSS


def test_sine_leaves_its_picture_where_it_is_told(small_sine):
    folder, path, _ = small_sine
    assert [found for found in folder.rglob("*") if found.is_file()] == [path]


def test_sine_leaves_its_picture_in_the_current_folder(tmp_path):
    options = ("--size", "8", "--hidden", "4", "--layers", "0", "--epochs", "1", "--device", "cpu")
    lines = succeeded(run("quantized_sine.py", *options, folder=tmp_path))
    assert lines[-3] == "picture quantized_sine.png"
    assert [found.name for found in tmp_path.iterdir()] == ["quantized_sine.png"]


def test_sine_draws_the_target_beside_a_prediction_like_it(small_sine, sine):
    _, path, _ = small_sine
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    drawn, predicted = (values(panel, (48, 48)) for panel in panels(imread(path)[..., :3]))
    target = sine.quantized_cosines(sine.coordinate_grid(48), (4.0, 2.0), 4).numpy()
    # The colour map has 256 entries; drawing may round a value to a neighbour of its own, never further.
    assert np.abs(drawn - target).max() < 1.5 / 255
    assert np.mean((predicted - target) ** 2) < LARGEST_LOSS
    # The loss allowed is 0.03 of a variance of 0.11: a correlation of at least sqrt(1 - 0.03 / 0.11) = 0.85.
    assert np.corrcoef(predicted.ravel(), target.ravel())[0, 1] > 0.85


def panels(image: np.ndarray) -> list[np.ndarray]:
    """Cut the two square pictures out of an image (H, W, 3): they are coloured, paper and titles are grey."""
    coloured = np.ptp(image, axis=2) > 0.1
    middle = image.shape[1] // 2
    found = []
    for columns in (slice(None, middle), slice(middle, None)):
        side, inked = image[:, columns], coloured[:, columns]
        top, bottom = np.flatnonzero(inked.any(axis=1))[[0, -1]]
        left, right = np.flatnonzero(inked.any(axis=0))[[0, -1]]
        assert inked[top : bottom + 1, left : right + 1].mean() > 0.98
        assert bottom - top == pytest.approx(right - left, abs=2)
        found.append(side[top : bottom + 1, left : right + 1])
    return found


def values(panel: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Read a panel (H, W, 3) at the middle of each of its pixels, its colours turned back into 0 to 1."""
    rows, columns = (
        ((np.arange(n) + 0.5) * length / n).astype(int)
        for n, length in zip(shape, panel.shape[:2], strict=True)
    )
    colours = panel[np.ix_(rows, columns)]
    table = colormaps["viridis"](np.arange(256))[:, :3]
    return np.abs(colours[:, :, None] - table).sum(axis=3).argmin(axis=2) / 255


@pytest.mark.parametrize(
    ("size", "frequency", "levels"),
    [
        (512, (4.0, 2.0), 4),
        (64, (4.0, 2.0), 4),
        (33, (1.0, 3.0), 2),
        (40, (0.0, 1.5), 7),
        (101, (2.5, 0.7), 16),
    ],
)
def test_target_is_the_quantized_sum_of_cosines(sine, size, frequency, levels):
    got = sine.quantized_cosines(sine.coordinate_grid(size), frequency, levels).numpy()
    step = np.arange(size) / (size - 1)
    across, down = (np.cos(2 * np.pi * f * step) for f in frequency)
    wave = across[None, :] + down[:, None]
    share = (wave - wave.min()) / (wave.max() - wave.min()) * levels
    expected = np.minimum(np.floor(share), levels - 1) / (levels - 1)
    # On an edge between two levels the last bit of a cosine decides, and the two libraries may differ in it.
    between = (share > 0.5) & (share < levels - 0.5)
    decided = ~between | (np.abs(share - np.round(share)) > 1e-9)
    assert decided.mean() > 0.9
    # Both divide the same small whole numbers, one of them in float32: half a unit in the last place below 1.
    assert np.abs(got - expected)[decided].max() <= 2.0**-25
    values = np.unique(got)
    assert len(values) == levels
    assert (values[0], values[-1]) == (0, 1)


def test_a_value_on_an_edge_is_of_the_level_above(sine):
    # At coordinates 0, 1/2 and 1 the cosines are 1, -1 and 1 exactly, and 0 is the edge between two levels.
    got = sine.quantized_cosines(sine.coordinate_grid(3), (1.0, 1.0), 2)
    assert got.tolist() == [[1, 1, 1], [1, 0, 1], [1, 1, 1]]


def test_grid_is_x_across_and_y_down(sine):
    x, y = sine.coordinate_grid(3)
    expected = torch.tensor([[0, 0.5, 1]] * 3, dtype=torch.float64)
    assert torch.equal(x, expected)
    assert torch.equal(y, expected.T)


def test_default_sizes_are_the_full_ones_on_cuda_only(sine, monkeypatch):
    def sizes(*options: str) -> dict[str, int]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["quantized_sine.py", *options])
            arguments = sine.parse_arguments()
        return {name: getattr(arguments, name) for name in ("size", "hidden", "layers", "epochs")}

    full = {"size": 512, "hidden": 256, "layers": 2, "epochs": 512}
    assert sizes("--device", "cuda:0") == full
    assert sizes("--device", "cuda", "--layers", "0") == full | {"layers": 0}
    assert sizes("--device", "cpu") == {"size": 64, "hidden": 128, "layers": 2, "epochs": 256}
