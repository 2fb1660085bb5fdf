"""The levels of ``amp.initialize``: what each one sets, what is refused, and what is returned."""

import inspect
import re

import pytest
import torch

from narrowcast.apex import amp
from narrowcast.errors import AmpError, UnsupportedError

LEVELS = ("O0", "O1", "O2", "O3")
# The table of apex's documentation: https://nvidia.github.io/apex/amp.html
TABLE = {
    "O0": (torch.float32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (torch.float16, False, True, True, "dynamic"),
    "O3": (torch.float16, False, False, False, 1.0),
}
PROPERTIES = [
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
]


def model():
    return torch.nn.Sequential(torch.nn.Conv2d(2, 3, 1), torch.nn.BatchNorm2d(3), torch.nn.ReLU())


def initialize(*arguments, **settings):
    return amp.initialize(*arguments, verbosity=0, **settings)


@pytest.mark.parametrize("level", LEVELS)
def test_the_table(level):
    initialize(model(), opt_level=level)
    found = amp._amp_state.opt_properties
    assert tuple(getattr(found, name) for name in PROPERTIES) == TABLE[level]
    assert found.opt_level == level
    assert found.enabled


def test_the_signature_is_apexs():
    # https://nvidia.github.io/apex/amp.html
    theirs = """models optimizers enabled=True opt_level='O1' cast_model_type patch_torch_functions
        keep_batchnorm_fp32 master_weights loss_scale cast_model_outputs num_losses=1 verbosity=1
        min_loss_scale max_loss_scale=16777216.0"""
    found = inspect.signature(amp.initialize).parameters.values()
    positional = [one for one in found if one.kind is one.POSITIONAL_OR_KEYWORD]
    defaults = [f"={one.default!r}" if one.default not in (None, one.empty) else "" for one in positional]
    assert [
        f"{one.name}{default}" for one, default in zip(positional, defaults, strict=True)
    ] == theirs.split()
    names = """initialize state_dict load_state_dict scale_loss disable_casts master_params half_function
        float_function promote_function register_half_function register_float_function
        register_promote_function init _amp_state lists"""
    assert all(hasattr(amp, name) for name in names.split())
    with pytest.raises(UnsupportedError, match=r"amp\.initialize\(model, optimizer, opt_level='O1'\)"):
        amp.init(enabled=True)


def test_a_wrapped_model_is_refused():
    with pytest.raises(AmpError, match="not wrapped yet, got a DataParallel: wrap what"):
        initialize(torch.nn.DataParallel(model()))


@pytest.mark.parametrize("level", LEVELS)
def test_a_half_model_is_refused_unless_it_is_asked_for(level):
    with pytest.raises(AmpError, match=r"got parameter '0.weight' in float16: leave out \.half\(\)"):
        initialize(model().half(), opt_level=level)
    with pytest.raises(AmpError, match=r"got buffer '1.running_mean' in bfloat16"):
        initialize(half_buffers(), opt_level=level)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    found = initialize(model().half(), opt_level=level)
    assert found[0].weight.dtype == (torch.float32 if level == "O0" else torch.float16)


def half_buffers():
    given = model()
    given[1].running_mean = given[1].running_mean.bfloat16()
    return given


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("enabled", [True, False])
def test_models_and_optimizers_return_in_the_shape_given(level, enabled):
    models = [model() for _ in range(5)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in models]
    settings = {"opt_level": level, "enabled": enabled}
    assert initialize(models[0], **settings) is models[0]
    for given in ((models[1], optimizers[1]), (models[2:4], optimizers[2:4]), (models[4:], optimizers[4])):
        assert initialize(*given, **settings) == given


def test_initialize_reports_its_settings(capsys):
    amp.initialize(model(), opt_level="O1", half_type=torch.bfloat16)
    amp.initialize(model(), opt_level="O2", loss_scale=128)
    amp.initialize(model(), opt_level="O3", verbosity=0)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "amp: O1: weights as they are, functions bfloat16 or float32 by the lists, loss scale dynamic",
        "amp: O2: weights float16, functions as they come, loss scale 128",
    ]


@pytest.mark.parametrize(("level", "eps"), [("O3", 1e-8), ("O3", 1e-4), ("O2", 1e-8), ("O1", 1e-8)])
def test_an_eps_that_half_does_not_hold_is_reported(level, eps, capsys):
    """apex's O3 with Adam's default settings: 0 / 0 where a gradient is 0."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), eps=eps)
    amp.initialize(net, optimizer, opt_level=level)
    is_lost = (level, eps) == ("O3", 1e-8)
    assert ("its eps of 1e-08 is 0 and weights become NaN" in capsys.readouterr().err) == is_lost
    if level == "O3":
        for weight in net.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        assert any(weight.isnan().any() for weight in net.parameters()) == is_lost


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"opt_level": "01"}, "got '01'; the first character is the letter O, not the number zero"),
        ({"opt_level": 2}, "expected opt_level to be 'O0', 'O1', 'O2' or 'O3', got 2"),
        ({"opt_level": "O1", "cast_model_type": torch.float16}, "no cast_model_type with opt_level='O1'"),
        ({"opt_level": "O2", "patch_torch_functions": True}, "patch_torch_functions=True only with"),
        ({"opt_level": "O2", "patch_torch_functions": "True"}, "patch_torch_functions=True only with"),
        ({"opt_level": "O1", "patch_torch_functions": "no"}, "True, False or None, got 'no'"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": "True"}, "no keep_batchnorm_fp32 with opt_level='O1'"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "yes"}, "True, False or None, got 'yes'"),
        ({"opt_level": "O1", "master_weights": True}, "no master_weights with opt_level='O1'"),
        ({"opt_level": "O2", "master_weights": "True"}, "True, False or None, got 'True'"),
        ({"opt_level": "O2", "loss_scale": "static"}, "loss_scale to be 'dynamic' or a finite number above"),
        ({"opt_level": "O2", "loss_scale": 0}, "a finite number above 0, got 0"),
        ({"opt_level": "O2", "cast_model_type": "float16"}, "cast_model_type to be a floating torch.dtype"),
        ({"opt_level": "O2", "cast_model_outputs": torch.int32}, "as torch.float16, got torch.int32"),
        ({"opt_level": "O1", "half_type": torch.float32}, "half_type to be torch.float16 or torch.bfloat16"),
        (
            {"opt_level": "O2", "half_type": torch.bfloat16, "cast_model_type": torch.float16},
            "to be one format, got torch.float16 and torch.bfloat16",
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together_are_refused(settings, said):
    given = model()
    with pytest.raises(AmpError, match=re.escape(said)):
        initialize(given, **settings)
    assert amp._amp_state.opt_properties is None
    assert given[0].weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "name", "wanted"),
    [
        ({"opt_level": "O2", "keep_batchnorm_fp32": "False"}, "keep_batchnorm_fp32", False),
        ({"opt_level": "O3", "keep_batchnorm_fp32": "True"}, "keep_batchnorm_fp32", True),
        ({"opt_level": "O2", "half_type": torch.bfloat16}, "cast_model_type", torch.bfloat16),
        ({"opt_level": "O2", "cast_model_type": False}, "cast_model_type", None),
        ({"opt_level": "O1", "cast_model_type": torch.float32}, "cast_model_type", None),
        ({"opt_level": "O1", "patch_torch_functions": False}, "patch_torch_functions", False),
        ({"opt_level": "O1", "patch_torch_functions": "False"}, "patch_torch_functions", False),
        ({"opt_level": "O1", "loss_scale": "128.0"}, "loss_scale", 128.0),
    ],
    ids=str,
)
def test_settings_in_place_of_the_levels_own(settings, name, wanted):
    found = initialize(model(), **settings)
    assert getattr(amp._amp_state.opt_properties, name) == wanted
    if name == "keep_batchnorm_fp32":
        assert found[1].weight.dtype == (torch.float32 if wanted else torch.float16)
    if name == "patch_torch_functions":
        assert found(torch.ones(2, 2, 1, 1)).dtype == torch.float32


def test_switched_off_it_does_nothing():
    given = model()
    optimizer = torch.optim.SGD(given.parameters(), lr=0.1)
    names = set(vars(optimizer))
    initialize(given, optimizer, enabled=False, opt_level="O2")
    assert given[0].weight.dtype == torch.float32
    loss = given(torch.ones(1, 2, 2, 2)).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert amp.state_dict() == {}
    assert set(vars(optimizer)) == names
    with pytest.raises(AmpError, match=r"^expected a torch.optim.Optimizer, got dict"):
        initialize(given, {"lr": 0.1}, enabled=False)
    with pytest.raises(TypeError, match=r"got an empty list$"):
        initialize([])
