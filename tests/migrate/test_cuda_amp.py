"""``torch.cuda.amp`` and ``torch.cpu.amp`` become ``torch.amp``."""

import textwrap
import warnings

import pytest
import torch
from rewriting import left_alone, migrated

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
    "brackets and comments stay": (
        "import torch\nr = torch.cuda.amp.autocast(\n    (flag),  # one, two\n    dtype = torch.half,\n)\n",
        'import torch\nr = torch.amp.autocast(\n    "cuda", enabled=(flag),  # one, two\n'
        "    dtype = torch.half,\n)\n",
    ),
    "keywords from a dictionary": (
        "import torch\nr = torch.cuda.amp.autocast(**how)\n",
        'import torch\nr = torch.amp.autocast("cuda", **how)\n',
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
    "import as": (
        "import torch.cuda.amp as amp\ns = amp.GradScaler()\n",
        'import torch.amp as amp\ns = amp.GradScaler("cuda")\n',
    ),
    "import of the module, torch imported too": (
        "import torch\nimport torch.cuda.amp\ns = torch.cuda.amp.GradScaler()\n",
        'import torch\ns = torch.amp.GradScaler("cuda")\n',
    ),
    "import of the module alone": (
        "import torch.cuda.amp\ns = torch.cuda.amp.GradScaler()\n",
        'import torch\ns = torch.amp.GradScaler("cuda")\n',
    ),
    "names in brackets": (
        "from torch.cuda.amp import (\n    GradScaler,  # scales\n    autocast,\n)\n"
        "s = GradScaler()\na = autocast()\n",
        "from torch.amp import (\n    GradScaler,  # scales\n    autocast,\n)\n"
        's = GradScaler("cuda")\na = autocast("cuda")\n',
    ),
    "in a function, with tabs and Windows line ends": (
        "def f():\r\n\tfrom torch.cuda.amp import autocast\r\n\twith autocast():\r\n\t\tpass\r\n",
        'def f():\r\n\tfrom torch.amp import autocast\r\n\twith autocast("cuda"):\r\n\t\tpass\r\n',
    ),
    "custom functions": (
        "from torch.cuda.amp import custom_bwd, custom_fwd\n@custom_fwd\ndef f(): pass\n"
        "@custom_fwd(cast_inputs=half)\ndef g(): pass\n@custom_bwd\ndef b(): pass\nh = custom_fwd(f)\n",
        'from torch.amp import custom_bwd, custom_fwd\n@custom_fwd(device_type="cuda")\ndef f(): pass\n'
        '@custom_fwd(cast_inputs=half, device_type="cuda")\ndef g(): pass\n@custom_bwd(device_type="cuda")\n'
        'def b(): pass\nh = custom_fwd(f, device_type="cuda")\n',
    ),
    "annotations and questions": (
        "import torch\ndef f(s: torch.cuda.amp.GradScaler):\n"
        "    return isinstance(s, torch.cuda.amp.GradScaler)\n",
        "import torch\ndef f(s: torch.amp.GradScaler):\n    return isinstance(s, torch.amp.GradScaler)\n",
    ),
    "the module in which it is defined": (
        "from torch.cuda.amp.grad_scaler import GradScaler\ns = GradScaler()\n",
        'from torch.amp import GradScaler\ns = GradScaler("cuda")\n',
    ),
    "letters beyond ASCII before it": (
        'import torch\nx = "äöü"; s = torch.cuda.amp.GradScaler(); y = "ß"\n',
        'import torch\nx = "äöü"; s = torch.amp.GradScaler("cuda"); y = "ß"\n',
    ),
    "brackets around what is called, with one in a comment": (
        "import torch\na = (torch.cuda.amp.autocast  # ( why\n     )(True)\n",
        'import torch\na = (torch.amp.autocast  # ( why\n     )("cuda", enabled=True)\n',
    ),
    "the modules inside by their names": (
        "from torch.cuda.amp import autocast_mode\nimport torch.cuda.amp.grad_scaler as gs\n"
        "a, s = autocast_mode.autocast(), gs.GradScaler()\n",
        "from torch.amp import autocast_mode\nimport torch.amp.grad_scaler as gs\n"
        'a, s = autocast_mode.autocast("cuda"), gs.GradScaler("cuda")\n',
    ),
    "parts of annotations, and types asked for": (
        "from torch.cuda.amp import GradScaler\ndef f(s: Optional[GradScaler], t: GradScaler | None):\n"
        "    return type(s) is GradScaler\n",
        "from torch.amp import GradScaler\ndef f(s: Optional[GradScaler], t: GradScaler | None):\n"
        "    return type(s) is GradScaler\n",
    ),
    "a region in one of another format keeps its own": (
        "import torch\nwith torch.autocast('cuda', torch.bfloat16), torch.cuda.amp.autocast(on, ):\n"
        "    with torch.cuda.amp.autocast():\n        pass\n",
        "import torch\nwith torch.autocast('cuda', torch.bfloat16), "
        'torch.amp.autocast("cuda", enabled=on, dtype=torch.float16, ):\n'
        '    with torch.amp.autocast("cuda", dtype=torch.float16):\n'
        "        pass\n",
    ),
    "two statements in a line": (
        "from torch.cuda.amp import GradScaler, common; s = GradScaler()\n",
        'from torch.cuda.amp import common; from torch.amp import GradScaler; s = GradScaler("cuda")\n',
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_rewritten(name):
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
def test_left_as_it_is_without_a_word(name):
    outcome = migrated(UNTOUCHED[name])
    assert outcome.text == UNTOUCHED[name]
    assert outcome.findings == ()


UNCLEAR = {
    "a value": "from torch.cuda.amp import autocast\nregion = autocast if on else other\n",
    "a base class": "import torch\nclass S(torch.cuda.amp.GradScaler):\n    pass\n",
    "arguments from a list": "from torch.cuda.amp import autocast\nwith autocast(*how):\n    pass\n",
    "an import that only others may use": "from torch.cuda.amp import autocast\n",
    "one of two uses": "from torch.cuda.amp import autocast\nx = autocast\nwith autocast():\n    pass\n",
    "something else of the module": "import torch\nx = torch.cuda.amp.amp_definitely_not_available()\n",
    "a star": "from torch.cuda.amp import *\ns = GradScaler()\n",
    "a string that is looked up": 'with patch("torch.cuda.amp.autocast"):\n    pass\n',
    "in an f-string, with its quotes": 'import torch\nprint(f"{torch.cuda.amp.GradScaler()}")\n',
    "what other files call by its old arguments": (
        "from torch.cuda.amp import GradScaler\n__all__ = ['GradScaler']\ns = GradScaler()\n"
    ),
    "what is handed on by its own name": (
        "from torch.cuda.amp import GradScaler as GradScaler\ns = GradScaler()\n"
    ),
    "a class that others call": "import torch\nclass T:\n    made = torch.cuda.amp.GradScaler\n",
    "a class with its first argument": (
        "import functools, torch\nmake = functools.partial(torch.cuda.amp.GradScaler, 2.0)\n"
    ),
    "a device where the scale belongs": "import torch\ns = torch.cuda.amp.GradScaler('cuda')\n",
    "which device it is for": (
        "import torch\nx = isinstance(s, torch.cuda.amp.GradScaler)\n"
        "y = isinstance(s, torch.cpu.amp.GradScaler)\n"
    ),
    "a region in one of another format, whose own cannot be named": (
        "import torch as th\nth.set_autocast_gpu_dtype(th.bfloat16)\nwith th.cuda.amp.autocast():\n    pass\n"
    ),
    "for a torch that has no torch.amp": (
        "import torch\nif hasattr(torch.amp, 'GradScaler'):\n    s = torch.amp.GradScaler('cuda')\n"
        "else:\n    s = torch.cuda.amp.GradScaler()\n"
    ),
    "for a torch of an older version": (
        "import torch\ns = torch.amp.GradScaler('cuda') if version.parse(torch.__version__) >= V "
        "else torch.cuda.amp.GradScaler()\n"
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
def test_what_is_not_clear_is_left_alone(name):
    outcome = migrated(UNCLEAR[name])
    assert outcome.text == UNCLEAR[name]
    assert [message for _, message in left_alone(outcome) if "is deprecated, and" in message]


def test_each_use_by_its_full_name_is_decided_alone():
    outcome = migrated("import torch\nx = torch.cuda.amp.autocast\ns = torch.cuda.amp.GradScaler()\n")
    assert outcome.text == 'import torch\nx = torch.cuda.amp.autocast\ns = torch.amp.GradScaler("cuda")\n'
    assert [line for line, _ in left_alone(outcome)] == [2]


def test_findings_have_the_line_of_the_file_as_it_was():
    text = textwrap.dedent(
        """\
        import torch
        import torch.cuda.amp
        from torch.cuda.amp import (
            GradScaler,
        )
        a = GradScaler()
        b = torch.cuda.amp.autocast
        """
    )
    outcome = migrated(text)
    assert [(finding.line, finding.column, finding.fixed) for finding in outcome.findings] == [
        (6, 5, True),
        (7, 5, False),
    ]


def test_a_region_inside_one_of_another_format_computes_as_before():
    """Why its format is named: torch's new regions go on with the format that is set, the old ones do not."""
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
