"""``nn.TransformerEncoder`` in evaluation: the zeros that torch's fast path writes at padded positions."""

import pytest
import torch
from torch import nn

import narrowcast as nc

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

PADDED = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]).bool()


def encoder(**settings):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, **settings).eval()


def norm_with_a_bias():
    norm = nn.LayerNorm(8)
    nn.init.uniform_(norm.bias)
    return norm


def close(found, expected):
    return torch.allclose(found, expected, rtol=0, atol=0.05)


# Where FP32 writes zeros: 3 of 15 positions, and all of a sequence that is padding throughout.
WITH_ZEROS = {
    "a mask": (encoder, PADDED, {}),
    "a mask of numbers": (encoder, torch.zeros(3, 5).masked_fill(PADDED, float("-inf")), {}),
    "an empty sequence": (encoder, PADDED | torch.tensor([[True], [False], [False]]), {}),
    "a norm after the zeros": (lambda: encoder(norm=norm_with_a_bias()), PADDED, {}),
    "no check of the mask": (lambda: encoder(mask_check=False), PADDED, {}),
    "is_causal without a mask": (encoder, PADDED, {"is_causal": True}),
}
WITHOUT = {
    "padding in front": (encoder, PADDED.flip(1), {}),
    "another mask": (encoder, PADDED, {"mask": torch.zeros(5, 5).bool()}),
    "nested tensors off": (lambda: encoder(enable_nested_tensor=False), PADDED, {}),
    "no mask": (encoder, None, {}),
}


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("case", [*WITH_ZEROS, *WITHOUT])
def test_padded_positions_are_those_of_fp32(case, policy):
    make, padding, more = (WITH_ZEROS | WITHOUT)[case]
    model, x = make(), torch.randn(3, 5, 8)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding, **more)
        with nc.attached(policy):
            found = model(x, src_key_padding_mask=padding, **more)
    assert close(found, expected)
    if case in WITH_ZEROS:
        filled = torch.zeros(8) if model.norm is None else model.norm(torch.zeros(8))
        assert torch.equal(found[padding != 0], filled.detach().expand(int((padding != 0).sum()), 8))


@pytest.mark.parametrize("case", ["gradients", "training", "the script's own switch"])
def test_where_fp32_takes_no_fast_path_nothing_is_zero(case):
    model, x = encoder(), torch.randn(3, 5, 8)
    model.train(case == "training")
    torch.backends.mha.set_fastpath_enabled(case != "the script's own switch")
    try:
        with torch.set_grad_enabled(case == "gradients"):
            expected = model(x, src_key_padding_mask=PADDED)
            with nc.attached("bf16"):
                found = model(x, src_key_padding_mask=PADDED)
        assert torch.backends.mha.get_fastpath_enabled() == (case != "the script's own switch")
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert close(found, expected)
    assert found[PADDED].abs().min() > 0


def test_an_encoder_inside_a_model_and_in_compiled_code():
    model, x = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval(), torch.randn(3, 5, 8)
    with torch.no_grad():
        expected = model.encoder(x, src_key_padding_mask=PADDED)
        compiled = torch.compile(model.encoder, backend="eager", fullgraph=True)
        expected_compiled = compiled(x, src_key_padding_mask=PADDED)
        with nc.attached("bf16"):
            assert close(model.encoder(x, src_key_padding_mask=PADDED), expected)
            assert close(compiled(x, src_key_padding_mask=PADDED), expected_compiled)
    torch._dynamo.reset()
    assert expected[PADDED].abs().max() == 0 < expected_compiled[PADDED].abs().min()


def test_compiled_code_without_a_check_of_the_mask_writes_the_zeros():
    model, x = encoder(mask_check=False), torch.randn(3, 5, 8)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=PADDED)
        with nc.attached("bf16"):
            found = torch.compile(model, backend="eager", fullgraph=True)(x, src_key_padding_mask=PADDED)
    torch._dynamo.reset()
    assert close(found, expected)
    assert found[PADDED].abs().max() == 0


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
def test_an_encoder_can_still_be_scripted():
    model = encoder()
    with nc.attached("bf16"):
        scripted = torch.jit.script(model)
    x = torch.randn(3, 5, 8)
    with torch.no_grad():
        assert torch.equal(scripted(x), model(x))


@pytest.mark.parametrize("kind", ["layer", "attention"])
def test_a_row_that_is_masked_throughout_is_nan_in_the_fast_path_alone(kind):
    padding = torch.tensor([[True] * 5, [False] * 5])
    x = torch.randn(2, 5, 8)
    layer = encoder().layers[0]
    attention = layer.self_attn

    def call():
        if kind == "layer":
            return layer(x, src_key_padding_mask=padding)
        return attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]

    with torch.no_grad():
        expected = call()
        with nc.attached("bf16"):
            found = call()
    assert expected[0].isnan().all()
    assert found.isfinite().all()
    assert close(found[1], expected[1])
