"""The perceptron of silos: its recurrent unit is torch's."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the 'neural' extra")
from hushrec.training.networks import gru  # noqa: E402
from hushrec.training.tensors import GROUP  # noqa: E402


def gru_params(generator, clients, d, h):
    shapes = {
        "gru/input": (d, 3 * h),
        "gru/state": (h, 3 * h),
        "gru/input_bias": (3 * h,),
        "gru/state_bias": (3 * h,),
    }
    return {
        name: torch.from_numpy(generator.standard_normal((clients, *shape)).astype(np.float32))
        for name, shape in shapes.items()
    }


def test_the_gru_is_torchs():
    generator = np.random.default_rng(0)
    p = gru_params(generator, GROUP, 6, 4)
    x = torch.from_numpy(generator.standard_normal((GROUP, 5, 6)).astype(np.float32))
    state = torch.from_numpy(generator.uniform(-1, 1, (GROUP, 5, 4)).astype(np.float32))
    ours = gru(p, x, state)
    for c in range(GROUP):
        theirs = torch.nn.GRU(6, 4)
        with torch.no_grad():
            theirs.weight_ih_l0.copy_(p["gru/input"][c].T)
            theirs.weight_hh_l0.copy_(p["gru/state"][c].T)
            theirs.bias_ih_l0.copy_(p["gru/input_bias"][c])
            theirs.bias_hh_l0.copy_(p["gru/state_bias"][c])
            out, _ = theirs(x[c][None], state[c][None])
        np.testing.assert_allclose(ours[c].numpy(), out[0].numpy(), atol=1e-6)
