"""Compiled programs as text: their collectives, groups and loops."""
