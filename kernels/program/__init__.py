"""Reads and evaluates jaxprs: the only place that does."""
