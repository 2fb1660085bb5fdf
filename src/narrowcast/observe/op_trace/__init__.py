"""What ran in which format: watches operators with the decision about each, their time and their casts."""

from narrowcast.observe.op_trace._trace import OpTrace, near_module, together, trace_events

__all__ = ["OpTrace", "near_module", "together", "trace_events"]
