"""What the server counts and times, for ``GET /metrics``: in the api process, which owns the clocks.

What only ranks know, what becomes of the KV pool, comes with rank 0's outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal

from tpserve.frontend.prometheus import Counter, Gauge, Histogram, Metric, render
from tpserve.messages import FinishReason, PoolReport
from tpserve.version import __version__

__all__ = ["Meter", "Metrics", "Outcome"]

Outcome = FinishReason | Literal["rejected"]
"""How a request ended: as ``finish_reason``; ``abort``: nobody waited any more; ``error``: the server failed;
``rejected``: the tokenizer refused it."""

OUTCOMES: tuple[Outcome, ...] = ("stop", "length", "abort", "error", "rejected")

STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)
WAITS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)


class Metrics:
    """The series of one server.

    Args:
        parts: which plugin was chosen for each kind, for the labels of ``tpserve_build_info``.
        clock: seconds that never go back.
    """

    def __init__(self, parts: Mapping[str, str] = {}, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        labels = {"version": __version__, **parts}
        build = Gauge("tpserve_build_info", "Always 1; the labels say what the server is made of.", labels)
        build.value = 1
        self.requests = Counter(
            "tpserve_requests_total", "Requests that have ended, by finish reason.", "finish_reason", OUTCOMES
        )
        self.running = Gauge("tpserve_num_requests_running", "Requests that have started and not ended.")
        self.waiting = Gauge("tpserve_num_requests_waiting", "Requests that are admitted and have not started.")
        self.prompt_tokens = Counter("tpserve_prompt_tokens_total", "Tokens of prompts that have started.")
        self.cached_tokens = Counter(
            "tpserve_prompt_tokens_cached_total", "Those of them that were found in the prefix cache."
        )
        self.generation_tokens = Counter("tpserve_generation_tokens_total", "Tokens generated.")
        self.ttft = Histogram(
            "tpserve_time_to_first_token_seconds", "From a request's admission to its first token.", WAITS
        )
        self.itl = Histogram("tpserve_inter_token_latency_seconds", "From one token of a request to its next.", STEPS)
        self.e2e = Histogram(
            "tpserve_e2e_request_latency_seconds", "From admission to the end, of requests that finish.", WAITS
        )
        self.prompt_length = Histogram(
            "tpserve_request_prompt_tokens", "Length of the prompt, of requests that finish.", LENGTHS
        )
        self.output_length = Histogram(
            "tpserve_request_generation_tokens", "Length of the output, of requests that finish.", LENGTHS
        )
        self.preemptions = Counter(
            "tpserve_num_preemptions_total", "Times that a running request had to give its pages up."
        )
        self.cache_queries = Counter(
            "tpserve_prefix_cache_queries_total", "Tokens looked up in the prefix cache, at each start of a request."
        )
        self.cache_hits = Counter("tpserve_prefix_cache_hits_total", "Those of them that were found.")
        self.evicted_pages = Counter(
            "tpserve_kv_cache_evicted_pages_total", "Pages of the prefix cache that were given up for others."
        )
        self.cache_usage = Gauge(
            "tpserve_kv_cache_usage_perc", "Share of the KV pool that running requests hold; 1 is all of it."
        )
        self.all: tuple[Metric, ...] = (
            *(build, self.requests, self.running, self.waiting),
            *(self.prompt_tokens, self.cached_tokens, self.generation_tokens),
            *(self.preemptions, self.cache_queries, self.cache_hits, self.evicted_pages, self.cache_usage),
            *(self.ttft, self.itl, self.e2e, self.prompt_length, self.output_length),
        )

    def take(self, report: PoolReport) -> None:
        """Count what rank 0 reports of the KV pool."""
        self.preemptions.add(report.retractions)
        self.cache_queries.add(report.looked_up)
        self.cache_hits.add(report.found)
        self.evicted_pages.add(report.evicted)
        self.cache_usage.value = report.usage

    def text(self) -> bytes:
        """All series as they stand, in Prometheus's text format."""
        return render(self.all)


class Meter:
    """Follows one request, from its admission to its one end.

    Args:
        metrics: where it counts.
    """

    __slots__ = ("_admitted", "_last", "_metrics", "_output_tokens", "_prompt_tokens", "_started")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._admitted = metrics.clock()
        self._last: float | None = None
        self._started = False
        self._prompt_tokens = 0
        self._output_tokens = 0
        metrics.waiting.value += 1

    def start(self, prompt_tokens: int, cached_tokens: int) -> None:
        """It has started; called once."""
        metrics = self._metrics
        self._started = True
        self._prompt_tokens = prompt_tokens
        metrics.waiting.value -= 1
        metrics.running.value += 1
        metrics.prompt_tokens.add(prompt_tokens)
        metrics.cached_tokens.add(cached_tokens)

    def token(self) -> None:
        """A token has come."""
        metrics = self._metrics
        now = metrics.clock()
        if self._last is None:
            metrics.ttft.observe(now - self._admitted)
        else:
            metrics.itl.observe(now - self._last)
        self._last = now
        self._output_tokens += 1
        metrics.generation_tokens.add(1)

    def end(self, outcome: Outcome) -> None:
        """It is over; called once."""
        metrics = self._metrics
        (metrics.running if self._started else metrics.waiting).value -= 1
        metrics.requests.add(1, outcome)
        if outcome in ("stop", "length"):
            metrics.e2e.observe(metrics.clock() - self._admitted)
            metrics.prompt_length.observe(self._prompt_tokens)
            metrics.output_length.observe(self._output_tokens)
