"""What is on no list runs in the type that it is given: every operator that PyTorch has samples of."""

import json
import sys
from pathlib import Path

import pytest

from child_processes import finished
from narrowcast.apex.amp import _rules

SCRIPT = Path(__file__).parent / "scripts" / "unlisted.py"
LISTED = {name for kinds in _rules._ORIGINAL.values() for name in kinds}
# Functions in Python that call listed ones, as they did under apex, which cast in those calls.
CALL_LISTED = {
    "__rmatmul__",  # torch.matmul
    "linalg.pinv",  # one of its samples is a product
    "masked.prod",  # torch.prod
    "nn.functional.gaussian_nll_loss",  # torch.log
    "nn.functional.linear_cross_entropy",  # linear and cross_entropy
    "nn.functional.multi_head_attention_forward",  # linear, baddbmm or bmm, and softmax
    "nn.functional.triplet_margin_with_distance_loss",  # sum
    "nn.functional.upsample_bilinear",  # interpolate
    "nn.functional.upsample_nearest",
    "pca_lowrank",  # torch.matmul; geqrf has no half
    "svd_lowrank",
}


@pytest.mark.long
def test_operators_on_no_list_keep_their_types():
    done = finished([sys.executable, SCRIPT])
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["samples"] > 2000
    different = {name for name in found["different"] if name.removeprefix("nn.functional.") not in LISTED}
    assert different <= CALL_LISTED, sorted(different - CALL_LISTED)
