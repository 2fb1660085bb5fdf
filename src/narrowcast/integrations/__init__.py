"""narrowcast in Lightning and Fabric, transformers, Accelerate and FSDP2.

Each module is imported by its own name, as ``narrowcast.integrations.accelerate``, and only it imports its
host.
"""

__all__: list[str] = []
