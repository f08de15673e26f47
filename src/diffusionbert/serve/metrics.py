"""The metrics for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name = "diffusionbert_"
        self.requests = Counter(f"{name}requests", "Requests.", ["endpoint", "status"], registry=self.registry)
        self.seconds = Histogram(
            f"{name}request_seconds", "Time to the last byte.", ["endpoint"], buckets=SECONDS, registry=self.registry
        )
        self.generated = Counter(f"{name}generated_tokens", "Generated tokens.", registry=self.registry)
        self.running = Gauge(f"{name}running_sequences", "Sequences being processed.", registry=self.registry)
        self.waiting = Gauge(f"{name}waiting_sequences", "Sequences waiting for a turn.", registry=self.registry)
        self.cancelled = Counter(f"{name}cancelled_sequences", "Sequences nobody waits for.", registry=self.registry)
        self.passes = Counter(f"{name}forward_passes", "Forward passes.", registry=self.registry)
        self.sequences = Counter(f"{name}forward_sequences", "Sequences in forward passes.", registry=self.registry)
        self.padding = Counter(f"{name}forward_padding", "Empty sequences in forward passes.", registry=self.registry)

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)
