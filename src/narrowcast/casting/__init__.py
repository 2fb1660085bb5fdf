"""Carry out a policy: operators run in other formats in its regions, and modules cast inputs and outputs.

``autocast``, ``custom_fwd`` and ``custom_bwd`` take the arguments of ``torch.autocast`` and ``torch.amp``;
``apply`` makes every call of a model open the policy's region and follow its rules for modules; ``compile``
is ``torch.compile`` of a model that computes by a policy; ``cast_floating`` casts the tensors in any nesting
of containers.
"""

from narrowcast.casting._torch_internals import skipped_by_dynamo, traced_only_inline
from narrowcast.casting.fp8 import is_fp8
from narrowcast.casting.kernels._direct_results import (
    DirectResults,
    begin_traced_model,
    call_compiled,
    recomputed_while_traced,
)
from narrowcast.casting.kernels._kernels import NotesOfResults
from narrowcast.casting.kernels._watching import ops_under_way, watch_ops
from narrowcast.casting.models._apply import (
    Applied,
    ModelRegion,
    applied_to,
    apply,
    refuse_in_torchscript,
    refuse_missed_by_all,
    unapplied,
)
from narrowcast.casting.models._bake import bake
from narrowcast.casting.models._compile import compile
from narrowcast.casting.models._layer_formats import layer_formats, weight_formats
from narrowcast.casting.models._tree import (
    cast_floating,
    cast_where,
    modules_by_path,
    tensors_inside,
    undo_on_error,
    with_what_it_wraps,
)
from narrowcast.casting.regions._autocast import (
    LastingRegion,
    ScopedRegion,
    active_scopes,
    autocast,
    custom_bwd,
    custom_fwd,
)
from narrowcast.casting.regions._policy_region import PolicyRegion
from narrowcast.casting.regions._scopes import PROMOTING, rule_that_casts
from narrowcast.casting.regions._warnings import stacklevel_outside
from narrowcast.casting.regions._weight_casts import drop_casts

__all__ = [
    "PROMOTING",
    "Applied",
    "DirectResults",
    "LastingRegion",
    "ModelRegion",
    "NotesOfResults",
    "PolicyRegion",
    "ScopedRegion",
    "active_scopes",
    "applied_to",
    "apply",
    "autocast",
    "bake",
    "begin_traced_model",
    "call_compiled",
    "cast_floating",
    "cast_where",
    "compile",
    "custom_bwd",
    "custom_fwd",
    "drop_casts",
    "is_fp8",
    "layer_formats",
    "modules_by_path",
    "ops_under_way",
    "recomputed_while_traced",
    "refuse_in_torchscript",
    "refuse_missed_by_all",
    "rule_that_casts",
    "skipped_by_dynamo",
    "stacklevel_outside",
    "tensors_inside",
    "traced_only_inline",
    "unapplied",
    "undo_on_error",
    "watch_ops",
    "weight_formats",
    "with_what_it_wraps",
]
