"""The ways data travels between ranks, side by side behind one contract (`base.Transport`)."""
