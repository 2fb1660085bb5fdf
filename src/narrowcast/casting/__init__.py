"""Making a policy true: regions in which ops run in other formats, and casts of what modules hand on.

``autocast``, ``custom_fwd`` and ``custom_bwd`` take the arguments of ``torch.autocast`` and ``torch.amp``;
``apply`` has a model open its region itself, rules for modules included; ``compile`` is ``torch.compile`` of
that; ``cast_floating`` casts the tensors inside any nesting of containers.
"""

from narrowcast.casting._autocast import PlacedRegion, autocast, region_in
from narrowcast.casting._bake import Baked, bake, baked
from narrowcast.casting._compile import compile
from narrowcast.casting._custom import custom_bwd, custom_fwd
from narrowcast.casting._fp8 import unconverted
from narrowcast.casting._fp8_linear import Fp8Linear
from narrowcast.casting._guards import forget_warnings
from narrowcast.casting._kernels import root_place
from narrowcast.casting._lasting import LastingRegion, places_here
from narrowcast.casting._modules import Applied, applied_to, apply
from narrowcast.casting._paths import clean_path, named_places
from narrowcast.casting._places import rule_that_casts
from narrowcast.casting._tree import cast_floating, cast_where
from narrowcast.casting._watching import OpCall, ops_under_way, watch_ops
from narrowcast.casting._weight_casts import drop_casts

__all__ = [
    "Applied",
    "Baked",
    "Fp8Linear",
    "LastingRegion",
    "OpCall",
    "PlacedRegion",
    "applied_to",
    "apply",
    "autocast",
    "bake",
    "baked",
    "cast_floating",
    "cast_where",
    "clean_path",
    "compile",
    "custom_bwd",
    "custom_fwd",
    "drop_casts",
    "forget_warnings",
    "named_places",
    "ops_under_way",
    "places_here",
    "region_in",
    "root_place",
    "rule_that_casts",
    "unconverted",
    "watch_ops",
]
