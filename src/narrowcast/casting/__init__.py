"""Making a policy true: regions in which ops run in other formats, and casts of what modules hand on.

``autocast``, ``custom_fwd`` and ``custom_bwd`` take the arguments of ``torch.autocast`` and ``torch.amp``;
``cast_floating`` casts the tensors inside any nesting of containers.
"""

from narrowcast.casting._autocast import QuietRegion, autocast
from narrowcast.casting._custom import custom_bwd, custom_fwd
from narrowcast.casting._guards import forget_warnings
from narrowcast.casting._tree import cast_floating

__all__ = ["QuietRegion", "autocast", "cast_floating", "custom_bwd", "custom_fwd", "forget_warnings"]
