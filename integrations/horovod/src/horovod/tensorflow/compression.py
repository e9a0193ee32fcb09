"""What `compression=` takes."""

from hvdp.tensorflow import Compression

__all__ = ["Compression"]
