"""Processes, meshes, global arrays and files."""
