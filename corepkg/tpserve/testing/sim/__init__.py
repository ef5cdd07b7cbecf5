"""A simulator: a leader, its followers and their clients in one process, in an order that a seed decides.

    python -m tpserve.testing.sim --seeds 0:1000

There are no threads and no clock. A seed decides the limits, the policy, what clients do, how fast each rank is and
what goes wrong; then the ranks' own rounds are run one by one, and after each it is checked that nothing is lost,
nobody starves, every answer is right, all ranks are in the same state, the leader keeps to its limits, and the cache
holds what it must. What goes wrong must end in an error that names rank and round, and never in a wrong answer.
"""

from tpserve.testing.sim.clients import Failure
from tpserve.testing.sim.simulation import Simulation

__all__ = ["Failure", "Simulation"]
