"""What outputs tell of the KV pool adds up to what has happened to it."""

from tests.unit.scheduler.served import Workload

from tpserve.kv.pool import KvPool
from tpserve.messages import PoolReport
from tpserve.scheduler.tally import PoolTally
from tpserve.tokens import pack_ids


def test_a_report_tells_what_is_new_and_only_that():
    pool = KvPool(8, 4, cache=True)
    tally = PoolTally(pool)
    assert tally.report() is None
    first = pool.admit(pack_ids(range(9)))
    pool.grow(first, 3)
    assert tally.report() == PoolReport(0, 9, 0, 0, 3 / 8)
    assert tally.report() is None
    pool.release(first, pack_ids(range(9)))
    tally.retractions += 1
    assert tally.report() == PoolReport(1, 0, 0, 0, 0.0)
    second = pool.admit(pack_ids([*range(4), *range(100, 105)]))
    pool.grow(second, 7)
    assert tally.report() == PoolReport(0, 9, 4, 1, 1.0)


def test_reports_add_up():
    seen = PoolReport(0, 0, 0, 0, 0.0)
    for seed in range(60):
        answers, log, script = Workload(seed).run()
        reports = [output.pool for output in answers.outputs if output.pool]
        counters = script.scheduler.capacity.pool.counters
        total = [
            sum(counts)
            for counts in zip(*[(r.retractions, r.looked_up, r.found, r.evicted) for r in reports], strict=True)
        ]
        if reports:
            assert total == [log.retracted, counters.looked_up, counters.found, counters.evicted], f"seed {seed}"
            assert reports[-1].usage == 0, f"seed {seed}"
            assert max(report.usage for report in reports) <= 1
            seen = PoolReport(*map(max, total, [seen.retractions, seen.looked_up, seen.found, seen.evicted]), 0.0)
    assert min(seen.retractions, seen.looked_up, seen.found, seen.evicted) > 0, "these workloads show too little"
