"""For tests of hvdp and of programs that use it: functions and scripts on real ranks."""

from hvdp.testing.ranks import RanksFailed, run_ranks
from hvdp.testing.scripts import Completed, run_script

__all__ = ["Completed", "RanksFailed", "run_ranks", "run_script"]
