"""The command line in this process, as its own tests run it."""

from tests.cli.conftest import cli

__all__ = ["cli"]
