"""``fairlanes://`` measured beside ``redis://``: run ``python -m tests.benchmarks``."""

STARTS = "starts"
"""List in the records' database: when tasks of `app` started, seconds since the epoch."""
