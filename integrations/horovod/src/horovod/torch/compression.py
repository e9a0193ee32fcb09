"""What `compression=` takes."""

from hvdp.torch import Compression

__all__ = ["Compression"]
