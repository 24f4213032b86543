"""Starts the engine: see `python -m launch --help`."""

__version__ = "0.1.0"
