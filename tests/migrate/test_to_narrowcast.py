"""``torch.amp`` becomes narrowcast where that is asked for."""

import importlib

import pytest
from rewriting import left_alone, migrated

from narrowcast.migrate._apex_kept import OFFERED

GOLDEN = {
    "full names": (
        "import torch\ns = torch.amp.GradScaler('cuda', enabled=on)\n"
        "with torch.autocast('cuda', torch.half):  # r\n    pass\n",
        "import torch\nimport narrowcast as nc\ns = nc.GradScaler('cuda', enabled=on)\n"
        "with nc.autocast('cuda', torch.half):  # r\n    pass\n",
    ),
    "imported names": (
        "'''Text.'''\nfrom torch.amp import GradScaler, autocast\n\ns = GradScaler()\na = autocast('cpu')\n",
        "'''Text.'''\nimport narrowcast as nc\n\ns = nc.GradScaler()\na = nc.autocast('cpu')\n",
    ),
    "one of the imported names": (
        "from torch import autocast, nn\na = autocast('cpu')\nn = nn.Linear(1, 1)\n",
        "from torch import nn\nimport narrowcast as nc\na = nc.autocast('cpu')\nn = nn.Linear(1, 1)\n",
    ),
    "deprecated ones": (
        "import torch\ns = torch.cuda.amp.GradScaler()\n",
        'import torch\nimport narrowcast as nc\ns = nc.GradScaler("cuda")\n',
    ),
    "custom functions": (
        "from torch import amp\n@amp.custom_fwd(device_type='cuda')\ndef f(): pass\n",
        "import narrowcast as nc\n@nc.custom_fwd(device_type='cuda')\ndef f(): pass\n",
    ),
    "a question keeps torch's class, of which narrowcast's is one": (
        "from torch.amp import GradScaler\ns = GradScaler()\nassert isinstance(s, GradScaler)\n",
        "from torch.amp import GradScaler\nimport narrowcast as nc\ns = nc.GradScaler()\n"
        "assert isinstance(s, GradScaler)\n",
    ),
    "narrowcast by its name here": (
        "import torch\nimport narrowcast as n\na = torch.autocast('cpu')\n",
        "import torch\nimport narrowcast as n\na = n.autocast('cpu')\n",
    ),
    "nc is taken": (
        "import torch\nnc = 5\na = torch.autocast('cpu')\n",
        "import torch\nimport narrowcast\nnc = 5\na = narrowcast.autocast('cpu')\n",
    ),
    "nc and narrowcast are taken": (
        "import torch\ndef f(nc, narrowcast):\n    return torch.autocast('cpu')\n",
        "import torch\nimport narrowcast as nc_\ndef f(nc, narrowcast):\n    return nc_.autocast('cpu')\n",
    ),
    "a name that hides narrowcast in a function": (
        "import torch\nimport narrowcast as nc\ndef f(nc):\n    return torch.autocast('cpu')\n",
        "import torch\nimport narrowcast as nc\nimport narrowcast\n"
        "def f(nc):\n    return narrowcast.autocast('cpu')\n",
    ),
    "a name that other files import from here": (
        "from torch.amp import GradScaler, autocast\n__all__ = ['GradScaler']\n"
        "s, a = GradScaler(), autocast('cpu')\n",
        "from torch.amp import GradScaler\nimport narrowcast as nc\n__all__ = ['GradScaler']\n"
        "s, a = nc.GradScaler(), nc.autocast('cpu')\n",
    ),
    "a use in the line of an import": (
        "import torch; a = torch.autocast('cpu')\n",
        "import narrowcast as nc\nimport torch; a = nc.autocast('cpu')\n",
    ),
    "a question after a region, which is no region of torch's": (
        "import torch\nassert isinstance(torch.autocast('cpu'), torch.autocast)\n",
        "import torch\nimport narrowcast as nc\nassert isinstance(nc.autocast('cpu'), nc.autocast)\n",
    ),
    "after the imports of the future": (
        "#!/usr/bin/env python\nfrom __future__ import annotations\nimport torch\n"
        "a = torch.autocast('cpu')\n",
        "#!/usr/bin/env python\nfrom __future__ import annotations\nimport torch\nimport narrowcast as nc\n"
        "a = nc.autocast('cpu')\n",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_rewritten(name):
    before, after = GOLDEN[name]
    assert migrated(before, "narrowcast").text == after


def test_only_on_request():
    text = GOLDEN["full names"][0]
    assert migrated(text).text == text


KEPT = {
    "a module that it has not": (
        "from apex.normalization import FusedLayerNorm as LN\n",
        "from apex.normalization import FusedLayerNorm as LN\n",
        "torch.nn.LayerNorm",
    ),
    "one name of several": (
        "from apex.parallel import Reducer as R, LARC\n",
        "from apex.parallel import LARC\nfrom narrowcast.apex.parallel import Reducer as R\n",
        "timm.optim.Lars",
    ),
    "a module of several": (
        "from apex import amp as a, mlp\n",
        "from apex import mlp\nfrom narrowcast.apex import amp as a\n",
        "torch.nn.Sequential",
    ),
    "a file of a module that it has": (
        "from apex.parallel.distributed import DistributedDataParallel\n",
        "from narrowcast.apex.parallel import DistributedDataParallel\n",
        None,
    ),
    "what a file of apex has for itself": (
        "from apex.parallel.distributed import flat_dist_call\n",
        "from apex.parallel.distributed import flat_dist_call\n",
        "parallel.distributed.flat_dist_call",
    ),
    "a plain import": (
        "import os, apex.contrib.xentropy as xe, apex.amp as a\n",
        "import os, apex.contrib.xentropy as xe\nimport narrowcast.apex.amp as a\n",
        "contrib.xentropy",
    ),
    "what is taken of apex as a whole": (
        "import apex\nn = apex.normalization.FusedLayerNorm\nopt = apex.amp.state_dict()\n",
        "import apex\nn = apex.normalization.FusedLayerNorm\nopt = apex.amp.state_dict()\n",
        "torch.nn.LayerNorm",
    ),
    "lists and the state, which are modules": (
        "from apex.amp.lists import torch_overrides\nfrom apex.amp.lists.torch_overrides import CASTS\n"
        "from apex.amp._amp_state import _amp_state, warn_or_err\n",
        "from narrowcast.apex.amp.lists import torch_overrides\n"
        "from narrowcast.apex.amp.lists.torch_overrides import CASTS\n"
        "from narrowcast.apex.amp._amp_state import _amp_state, warn_or_err\n",
        None,
    ),
}


USED = (
    "LN", "LARC", "a", "R", "mlp", "DistributedDataParallel", "flat_dist_call", "xe", "torch_overrides",
    "CASTS", "_amp_state", "warn_or_err",
)  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_only_what_narrowcast_has_is_imported_from_it(name):
    before, after, instead = KEPT[name]
    rest = "from apex import amp\nm = amp.initialize(m, opt_level='O3')\n"
    rest += f"use({', '.join(name for name in USED if name in before)})\n"
    outcome = migrated(before + rest, "narrowcast")
    assert outcome.text == after + rest.replace("from apex", "from narrowcast.apex")
    left = [message for _, message in left_alone(outcome)]
    assert not left if instead is None else any(instead in message for message in left)


@pytest.mark.parametrize("module", OFFERED)
def test_what_is_imported_from_narrowcast_is_there(module):
    there = importlib.import_module(f"narrowcast.{module}")
    assert not OFFERED[module] or set(there.__all__) == OFFERED[module]
