"""The contract of `hvdp.transports.base` as a test of any transport."""

from hvdp.testing.conformance.kit import check_transport

__all__ = ["check_transport"]
