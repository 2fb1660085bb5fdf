"""``torch.cuda.amp`` and ``torch.cpu.amp`` become ``torch.amp``, and that narrowcast on request."""

import warnings

import pytest
import torch
from rewriting import left_alone, migrated, numbers

GOLDEN = {
    "a full name": (
        "import torch\nwith torch.cuda.amp.autocast():\n    pass\n",
        'import torch\nwith torch.amp.autocast("cuda"):\n    pass\n',
    ),
    "arguments by place get names": (
        "import torch\nwith torch.cuda.amp.autocast(flag, torch.bfloat16, False):  # why\n    pass\n",
        "import torch\n"
        'with torch.amp.autocast("cuda", enabled=flag, dtype=torch.bfloat16, cache_enabled=False):  # why\n'
        "    pass\n",
    ),
    "comments stay": (
        "import torch\nr = torch.cuda.amp.autocast(\n    flag,  # one, two\n    dtype = torch.half,\n)\n",
        'import torch\nr = torch.amp.autocast("cuda", \n    enabled=flag,  # one, two\n'
        "    dtype = torch.half,\n)\n",
    ),
    "the CPU": (
        "import torch\nwith torch.cpu.amp.autocast(True), torch.cpu.amp.autocast():\n    pass\n",
        'import torch\nwith torch.amp.autocast("cpu", enabled=True), torch.amp.autocast("cpu"):\n    pass\n',
    ),
    "a scaler's arguments keep their places": (
        "from torch.cuda.amp import GradScaler\ns = GradScaler(2.0, enabled=on)\nt = GradScaler()\n",
        'from torch.amp import GradScaler\ns = GradScaler("cuda", 2.0, enabled=on)\nt = GradScaler("cuda")\n',
    ),
    "an alias": (
        "from torch.cuda.amp import autocast as ac\n\n\n@ac()\ndef f():\n    pass\n",
        'from torch.amp import autocast as ac\n\n\n@ac("cuda")\ndef f():\n    pass\n',
    ),
    "the module by another name": (
        "from torch.cuda import amp, device  # both\nwith amp.autocast():\n    pass\n",
        "from torch.cuda import device\nfrom torch import amp  # both\n"
        'with amp.autocast("cuda"):\n    pass\n',
    ),
    "import of the module, torch imported too": (
        "import torch\nimport torch.cuda.amp\ns = torch.cuda.amp.GradScaler()\n",
        'import torch\ns = torch.amp.GradScaler("cuda")\n',
    ),
    "in a function, with tabs and Windows line ends": (
        "def f():\r\n\tfrom torch.cuda.amp import autocast\r\n\twith autocast():\r\n\t\tpass\r\n",
        'def f():\r\n\tfrom torch.amp import autocast\r\n\twith autocast("cuda"):\r\n\t\tpass\r\n',
    ),
    "custom functions": (
        "from torch.cuda.amp import custom_bwd, custom_fwd\n@custom_fwd\ndef f(): pass\n"
        "@custom_fwd(cast_inputs=half)\ndef g(): pass\n@custom_bwd\ndef b(): pass\n",
        'from torch.amp import custom_bwd, custom_fwd\n@custom_fwd(device_type="cuda")\ndef f(): pass\n'
        '@custom_fwd(device_type="cuda", cast_inputs=half)\ndef g(): pass\n@custom_bwd(device_type="cuda")\n'
        "def b(): pass\n",
    ),
    "the module in which it is defined": (
        "from torch.cuda.amp.grad_scaler import GradScaler\ns = GradScaler()\n",
        'from torch.amp import GradScaler\ns = GradScaler("cuda")\n',
    ),
    "letters beyond ASCII before it": (
        'import torch\nx = "äöü"; s = torch.cuda.amp.GradScaler(); y = "ß"\n',
        'import torch\nx = "äöü"; s = torch.amp.GradScaler("cuda"); y = "ß"\n',
    ),
    "the modules inside by their names": (
        "from torch.cuda.amp import autocast_mode\nimport torch.cuda.amp.grad_scaler as gs\n"
        "a, s = autocast_mode.autocast(), gs.GradScaler()\n",
        "from torch.amp import autocast_mode\nimport torch.amp.grad_scaler as gs\n"
        'a, s = autocast_mode.autocast("cuda"), gs.GradScaler("cuda")\n',
    ),
    "parts of annotations": (
        "from torch.cuda.amp import GradScaler\ndef f(s: Optional[GradScaler], t: GradScaler | None):\n"
        "    return isinstance(s, GradScaler)\n",
        "from torch.amp import GradScaler\ndef f(s: Optional[GradScaler], t: GradScaler | None):\n"
        "    return isinstance(s, GradScaler)\n",
    ),
    "a region in one of another format keeps its own": (
        "import torch\nwith torch.autocast('cuda', torch.bfloat16), torch.cuda.amp.autocast(on, ):\n"
        "    with torch.cuda.amp.autocast():\n        pass\n",
        "import torch\nwith torch.autocast('cuda', torch.bfloat16), "
        'torch.amp.autocast("cuda", dtype=torch.float16, enabled=on, ):\n'
        '    with torch.amp.autocast("cuda", dtype=torch.float16):\n'
        "        pass\n",
    ),
    "None with an annotation, after a failed import": (
        "try:\n    from torch.cuda.amp import autocast\nexcept ImportError:\n    autocast: Any = None\n"
        "with autocast():\n    pass\n",
        "try:\n    from torch.amp import autocast\nexcept ImportError:\n    autocast: Any = None\n"
        'with autocast("cuda"):\n    pass\n',
    ),
    "two statements in a line": (
        "from torch.cuda.amp import GradScaler, common; s = GradScaler()\n",
        'from torch.cuda.amp import common; from torch.amp import GradScaler; s = GradScaler("cuda")\n',
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_deprecated_names_become_torch_amp(name):
    before, after = GOLDEN[name]
    assert migrated(before).text == after


UNTOUCHED = {
    "another name that is called so": "def f(autocast):\n    with autocast():\n        pass\n",
    "a local variable hides the import": (
        "from torch.amp import autocast\ndef f(GradScaler):\n    return GradScaler(), autocast('cuda')\n"
    ),
    "torch.amp already": "import torch\ns = torch.amp.GradScaler('cuda')\n",
    "words in strings and comments": "# torch.cuda.amp.autocast()\nx = 'torch.cuda.amp.GradScaler()'\n",
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_other_names_are_left_without_a_finding(name):
    outcome = migrated(UNTOUCHED[name])
    assert outcome.text == UNTOUCHED[name]
    assert outcome.findings == ()


UNCLEAR = {
    "a base class": "import torch\nclass S(torch.cuda.amp.GradScaler):\n    pass\n",
    "arguments from a list": "from torch.cuda.amp import autocast\nwith autocast(*how):\n    pass\n",
    "brackets around an argument": "import torch\nr = torch.cuda.amp.autocast((flag))\n",
    "a custom function that is called": ("from torch.cuda.amp import custom_fwd\nh = custom_fwd(f)\n"),
    "an import that only others may use": "from torch.cuda.amp import autocast\n",
    "one of two uses": "from torch.cuda.amp import autocast\nx = autocast\nwith autocast():\n    pass\n",
    "a star": "from torch.cuda.amp import *\ns = GradScaler()\n",
    "in an f-string, with its quotes": 'import torch\nprint(f"{torch.cuda.amp.GradScaler()}")\n',
    "what other files call by its old arguments": (
        "from torch.cuda.amp import GradScaler\n__all__ = ['GradScaler']\ns = GradScaler()\n"
    ),
    "a class with its first argument": (
        "import functools, torch\nmake = functools.partial(torch.cuda.amp.GradScaler, 2.0)\n"
    ),
    "a device where the scale belongs": "import torch\ns = torch.cuda.amp.GradScaler('cuda')\n",
    "a region in one of another format, whose own cannot be named": (
        "import torch as th\nth.set_autocast_gpu_dtype(th.bfloat16)\nwith th.cuda.amp.autocast():\n    pass\n"
    ),
    "for a torch that has no torch.amp": (
        "import torch\nif hasattr(torch.amp, 'GradScaler'):\n    s = torch.amp.GradScaler('cuda')\n"
        "else:\n    s = torch.cuda.amp.GradScaler()\n"
    ),
    "for a torch that raises": (
        "import torch\ntry:\n    s = torch.amp.GradScaler('cuda')\nexcept AttributeError:\n"
        "    s = torch.cuda.amp.GradScaler()\n"
    ),
    "two things it may be": (
        "try:\n    from torch.cuda.amp import autocast\nexcept ImportError:\n    from mine import autocast\n"
        "with autocast():\n    pass\n"
    ),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_an_unclear_use_is_left_and_reported(name):
    outcome = migrated(UNCLEAR[name])
    assert outcome.text == UNCLEAR[name]
    assert [message for _, message in left_alone(outcome) if "is deprecated, and" in message]


def test_one_unclear_use_leaves_the_file_alone():
    text = "import torch\nx = torch.cuda.amp.autocast\ns = torch.cuda.amp.GradScaler()\n"
    outcome = migrated(text)
    assert outcome.text == text
    assert [line for line, _ in left_alone(outcome)] == [2]


def test_a_region_inside_another_dtype_keeps_its_dtype():
    """Why its dtype is written out: torch's new regions keep the dtype that is set, the old ones do not."""
    text = """\
import torch
with torch.autocast("cpu", torch.float16):
    with torch.cpu.amp.autocast():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
"""
    products = []
    for one in (text, migrated(text).text, text.replace("cpu.amp.autocast()", 'amp.autocast("cpu")')):
        scope = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            exec(one, scope)
        products.append(scope["product"].dtype)
    assert products == [torch.bfloat16, torch.bfloat16, torch.float16]


NATIVE = """\
import torch
from torch.cpu.amp import autocast, GradScaler

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler(2.0 ** 8, enabled=True)
x = torch.randn(16, 8)
for step in range(4):
    optimizer.zero_grad()
    with autocast(True, torch.bfloat16):
        loss = torch.nn.functional.mse_loss(model(x), x[:, :1])
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    print(loss.item(), norm.item())
"""


@pytest.mark.parametrize("target", ["torch", "narrowcast"])
def test_a_migrated_script_trains_alike_without_a_warning(target):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the deprecated names
        before = numbers(NATIVE)
    text = migrated(NATIVE, target).text
    assert numbers(text) == before


TO_NARROWCAST = {
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
    "a script that falls back to a CPU, where torch's turn themselves off": (
        "import torch\nd = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "s = torch.cuda.amp.GradScaler(4.0)\n"
        "a = torch.autocast('cuda')\nb = torch.autocast('cuda', enabled=on)\nc = torch.autocast(d)\n",
        "import torch\nimport narrowcast as nc\nd = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        's = nc.GradScaler("cuda", 4.0, enabled=torch.cuda.is_available())\n'
        "a = nc.autocast('cuda', enabled=torch.cuda.is_available())\nb = nc.autocast('cuda', enabled=on)\n"
        "c = nc.autocast(d)\n",
    ),
    "such a script that names the device by keyword": (
        "import torch\nd = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "a = torch.autocast(device_type='cuda', dtype=torch.float16)\n"
        "s = torch.amp.GradScaler(device='cuda')\n"
        "b = torch.autocast(device_type=d)\n",
        "import torch\nimport narrowcast as nc\nd = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "a = nc.autocast(enabled=torch.cuda.is_available(), device_type='cuda', dtype=torch.float16)\n"
        "s = nc.GradScaler(enabled=torch.cuda.is_available(), device='cuda')\n"
        "b = nc.autocast(device_type=d)\n",
    ),
    "a question keeps torch's class, of which narrowcast's is one": (
        "from torch.amp import GradScaler\ns = GradScaler()\nassert isinstance(s, GradScaler)\n",
        "from torch.amp import GradScaler\nimport narrowcast as nc\ns = nc.GradScaler()\n"
        "assert isinstance(s, GradScaler)\n",
    ),
    "nc is taken": (
        "import torch\nnc = 5\na = torch.autocast('cpu')\n",
        "import torch\nimport narrowcast\nnc = 5\na = narrowcast.autocast('cpu')\n",
    ),
    "a name that other files import from here": (
        "from torch.amp import GradScaler, autocast\n__all__ = ['GradScaler']\n"
        "s, a = GradScaler(), autocast('cpu')\n",
        "from torch.amp import GradScaler\nimport narrowcast as nc\n__all__ = ['GradScaler']\n"
        "s, a = nc.GradScaler(), nc.autocast('cpu')\n",
    ),
    "a question after a region, which is no region of torch's": (
        "import torch\nassert isinstance(torch.autocast('cpu'), torch.autocast)\n",
        "import torch\nimport narrowcast as nc\nassert isinstance(nc.autocast('cpu'), nc.autocast)\n",
    ),
    "an import of the future on the line of the last import": (
        "from __future__ import annotations; from torch.cuda.amp import autocast\na = autocast()\n",
        'from __future__ import annotations; pass\nimport narrowcast as nc\na = nc.autocast("cuda")\n',
    ),
    "a docstring on the line of the last import": (
        "'Text.'; import torch\na = torch.autocast('cpu')\n",
        "'Text.'; import torch\nimport narrowcast as nc\na = nc.autocast('cpu')\n",
    ),
    "after the imports of the future": (
        "#!/usr/bin/env python\nfrom __future__ import annotations\nimport torch\n"
        "a = torch.autocast('cpu')\n",
        "#!/usr/bin/env python\nfrom __future__ import annotations\nimport torch\nimport narrowcast as nc\n"
        "a = nc.autocast('cpu')\n",
    ),
}


@pytest.mark.parametrize("name", TO_NARROWCAST)
def test_torch_names_become_narrowcast(name):
    before, after = TO_NARROWCAST[name]
    assert migrated(before, "narrowcast").text == after


def test_the_call_that_unscales_and_clips_is_named():
    text = "import torch\ns = torch.amp.GradScaler()\ns.unscale_(o)\ntorch.nn.utils.clip_grad_norm_(p, 1.0)\n"
    told = [finding.message for finding in migrated(text, "narrowcast").findings]
    assert len(told) == 1
    assert told[0].endswith("; its clip_grad_norm_(optimizer, max_norm) unscales and clips in one call")
