"""Small encoders of torch.nn in float64, and functions to run and compare them."""

import torch
from torch import nn
from torch.testing import assert_close

EXACT = 1e-12  # float64, a few thousand roundings on values of order 1
VALID = torch.arange(7) < torch.tensor([[7], [5], [3]])


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0, dtype=torch.float64, **options)


def encoder(**options):
    model = nn.TransformerEncoder(encoder_layer(), 2, **options)
    for parameter in model.parameters():  # torch gives all layers the same weights, and biases of zero
        nn.init.normal_(parameter, std=0.25)
    return model


def run(model, padded, grad=True):
    """Return the outputs at valid tokens, and the gradients of all parameters."""
    torch.manual_seed(1)
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    valid = VALID if padded else torch.ones_like(VALID)
    with torch.set_grad_enabled(grad):
        out = model(x, src_key_padding_mask=~VALID if padded else None)[valid]
    if not grad:
        return out, []
    return out, list(torch.autograd.grad(out.square().sum(), list(model.parameters())))


def agree(a, b, atol=EXACT):
    assert_close(a[0], b[0], atol=atol, rtol=0)
    for x, y in zip(a[1], b[1], strict=True):
        assert_close(x, y, atol=10 * atol * max(1.0, y.abs().max().item()), rtol=0)


def distance(a, b):
    return (a[0] - b[0]).abs().max().item()
