"""Benchmarks of the methods of exchange, on networks of any speed inside one machine."""
