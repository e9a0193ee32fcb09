"""The collectives, one file each; all fill in `Operation`."""
