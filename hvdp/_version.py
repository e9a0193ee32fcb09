"""The version, read by the build and by `hvdprun --version`."""

__version__ = "0.1.0"
