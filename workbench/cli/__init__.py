"""The command line, a file per group of verbs (see `entry`); imports of torch and NeMo happen inside the verbs."""

from workbench.cli.entry import main

__all__ = ["main"]
