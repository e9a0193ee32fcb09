"""The engine: no framework, no MPI, no launcher."""
