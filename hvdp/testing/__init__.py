"""For tests of hvdp and of programs that use it: functions and scripts on real ranks."""

from hvdp.testing.conformance import check_transport
from hvdp.testing.ranks import RanksFailed, run_ranks
from hvdp.testing.scripts import Completed, run_script
from hvdp.testing.worlds import World, worlds

__all__ = ["Completed", "RanksFailed", "World", "check_transport", "run_ranks", "run_script", "worlds"]
