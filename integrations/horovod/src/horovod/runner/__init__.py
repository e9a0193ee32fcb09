"""Starting jobs: the command only; `horovodrun` is installed by hvdp."""
