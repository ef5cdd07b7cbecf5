"""Members of gloo groups that stop: one at each moment of meeting, as either of two.

``python stopping_members.py DIRECTORY`` writes a line for each: its process, its rank, where it meets, and whether the
other may think that they have met.
"""

import os
import signal
import sys
from pathlib import Path

from tpserve.distributed import files
from tpserve.distributed.gloo import make_group

SAID_WHERE = "wait 0/0"
MOMENTS = ["wait came/0", "set 0/{rank}", SAID_WHERE, "get 0/1", "set met/{rank}"]


def stop_at(moment: str) -> None:
    def stopping(name, right):
        def method(self, keys, *rest):
            if moment == f"{name} {keys if isinstance(keys, str) else keys[0]}":
                os.kill(os.getpid(), signal.SIGSTOP)
            return right(self, keys, *rest)

        return method

    for name in ("set", "wait", "get"):
        setattr(files.FileExchange, name, stopping(name, getattr(files.FileExchange, name)))


def main() -> None:
    for moment in MOMENTS:
        for rank in (0, 1):
            path = Path(sys.argv[1], f"{moment.replace('/', '').format(rank=rank)} {rank}".replace(" ", "-"))
            pid = os.fork()
            if not pid:
                stop_at(moment.format(rank=rank))
                try:
                    make_group(path, rank, 2, 60.0)
                finally:
                    os._exit(0)
            print(pid, rank, path, moment not in MOMENTS[:2], flush=True)


main()
