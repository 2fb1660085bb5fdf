"""What every operator gives for low inputs in regions that promote, and what of it runs under vmap."""

import json
import sys
from pathlib import Path

import pytest

from child_processes import finished

# Of three dimensions it falls into matmuls, below which autocast is on again, as under torch.autocast.
STOPS_UNDER_VMAP = {"nn.functional.scaled_dot_product_attention"}


@pytest.mark.long
def test_low_inputs_give_no_third_format_and_run_under_vmap():
    script = Path(__file__).parent / "scripts" / "formats_with_promotion.py"
    ended = finished([sys.executable, str(script)], limit_s=800)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["third formats"] == []
    assert set(found["stopped under vmap"]) <= STOPS_UNDER_VMAP
    assert found["tried"] > 10_000
