"""The benchmark runs, and its rounds are of the kind that it says."""

from tpserve.bench.scheduler import measure


def test_every_quantile_is_told() -> None:
    result = measure("fcfs", running=3, waiting=5, rounds=10, overlap=True)
    assert (result["policy"], result["running"], result["waiting"]) == ("fcfs", 3, 5)
    assert 0 < result["p50"] <= result["p90"] <= result["p99"]
