"""The check that a host is installed and new enough."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from narrowcast.errors import MissingModuleError


def require(package: str, least: str, extra: str) -> None:
    """Refuse a host that is missing, or older than the one that the integration was written for.

    Args:
        package: the name of the distribution, as ``"accelerate"``.
        least: the oldest version that works, as ``"1.10"``.
        extra: the extra of narrowcast that installs it.

    Raises:
        MissingModuleError: with the line to type.
    """
    how = f"pip install 'narrowcast[{extra}]'"
    try:
        installed = version(package)
    except PackageNotFoundError:
        raise MissingModuleError(
            f"expected {package} {least} or newer, and it is not installed: {how}"
        ) from None
    if _numbers(installed) < _numbers(least):
        raise MissingModuleError(f"expected {package} {least} or newer, got {installed}: {how}")


def _numbers(version_text: str) -> tuple[int, int]:
    """Return the first two numbers of a version: (2, 6) of "2.6.0rc1"."""
    major, minor = version_text.split(".")[:2]
    return int(major), int(minor)
