"""`GET /metrics`: what Prometheus reads."""
