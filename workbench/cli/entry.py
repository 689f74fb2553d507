"""The command line: `workbench demo | transcribe | profile | bench | capacity | tune | confirm | best | twin | show | doctor`.

Verbs are thin: they read options, call the library and print. Heavy imports happen inside them, so `--help` answers at once. Results go to
standard output (a table, or one JSON object with --json); progress and messages go to standard error. Exit codes: 0 done, 1 a run-time
failure, 2 wrong input, 3 done in part (some inputs were skipped and are listed), 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from workbench import __version__
from workbench.cli import bench
from workbench.cli.capacity import capacity
from workbench.cli.profile import graphed_table, profile
from workbench.cli.records import doctor, show
from workbench.cli.speech import demo, transcribe
from workbench.cli.tune import best, confirm, tune, twin
from workbench.errors import (
    ArenaFull,
    GeneratorLagged,
    InputError,
    LoadNotCarried,
    QueueFull,
    StepTimeout,
    StreamClosed,
)

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False
)


profile_app = typer.Typer(invoke_without_command=True, help="Where the time of a step goes.")


bench_app = typer.Typer(no_args_is_help=True, help="Measure throughput, paced latency and the scheduler core.")


def main() -> None:
    """Entry point: typed errors become one line and an exit code, never a traceback."""
    try:
        code = app(standalone_mode=False) or 0
        if code == 130:  # newer typers turn Ctrl-C into this exit code and say nothing
            _fail("interrupted", 130)
        sys.exit(code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except (GeneratorLagged, LoadNotCarried) as error:  # nothing was wrong with the input: the machine did not keep up
        _fail(str(error), 1)
    except InputError as error:
        _fail(str(error), 2)
    except (QueueFull, ArenaFull, StreamClosed, StepTimeout) as error:
        _fail(f"{type(error).__name__}: {error}", 1)
    except BrokenPipeError:  # whoever read our output has seen enough
        sys.stderr.close()
        os._exit(1)
    except OSError as error:
        _fail(f"{error.filename or 'output'}: {error.strerror or error}", 1)
    except Exception as error:
        # Usage errors: their class lives in click or, in newer typers, in a private copy of it.
        if not (hasattr(error, "show") and hasattr(error, "exit_code")):
            raise
        error.show()
        sys.exit(error.exit_code)


def _fail(message: str, code: int) -> None:
    print(f"workbench: {message}", file=sys.stderr)
    sys.exit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Profile, graph, batch and tune streaming speech recognition on GPUs."""


app.callback()(_root)
for verb in (demo, transcribe, capacity, tune, confirm, best, twin, show, doctor):
    app.command()(verb)
profile_app.callback()(profile)
profile_app.command("graphed-table")(graphed_table)
for name in ("asr", "paced", "overload", "core", "costs", "twin"):
    bench_app.command(name)(getattr(bench, f"bench_{name}"))
app.add_typer(profile_app, name="profile")
app.add_typer(bench_app, name="bench")
