"""Loss scales as frozen values: a transition returns a new value, and off is a value too."""

from narrowcast.scaling._scales import Dynamic, LossScale, Off, Static, parse

__all__ = ["Dynamic", "LossScale", "Off", "Static", "parse"]
