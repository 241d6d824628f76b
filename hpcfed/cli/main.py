"""The ``hpcfed`` command: one module per subcommand, imported only when it is called."""

from __future__ import annotations

import gc
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import click

from hpcfed.config import registry
from hpcfed.errors import HOST_FULL, EnvironmentFailure, HpcfedError, nearest, system_failure, visible
from hpcfed.io.node import working_folder
from hpcfed.ranks.early import end_noting, ignore_signals, note_signals
from hpcfed.ranks.threads import NO_MORE, no_more_threads
from hpcfed.version import __version__

SUBCOMMANDS = {
    "prepare": "Turn raw data into a federation file.",
    "inspect": "Show what is in a federation file.",
    "run": "Run a recipe, alone or under mpirun or srun.",
    "sweep": "Run a recipe over a grid of settings and seeds, and compare.",
    "study": "Compare methods and baselines at a few sites, over splits of their samples.",
    "reproduce": "Run an experiment of a paper, and print the results beside the paper's.",
    "report": "Draw figures and one HTML page from finished or running runs.",
    "watch": "Show curves, progress and the time left of runs that go on, or have ended.",
    "certify": "Check a run's certificate, and sign it with an SSH key.",
    "verify": "Check a run: its files, and its rounds computed again.",
    "replay": "Train one client of one round of a run again, step by step.",
    "compare": "Find the round, client and step in which two runs part.",
    "without": "Run a run again as if some clients had never taken part.",
    "contributions": "Say what each client brings to a run, and takes from it.",
    "vectors": "Write or check small trajectories of every method, for other frameworks.",
    "predict": "Apply a run's model to the rows of a table.",
    "export": "Write a trained model for other programs, with a model card.",
    "cite": "Print BibTeX for what a run used.",
    "doctor": "Say what this machine and this MPI offer, and what looks slow or wrong.",
    "schema": "Print the JSON Schema of a recipe, or of what a command prints with --json.",
    "estimate": "Say what a run will take, before it is submitted.",
    "submit": "Submit a recipe to SLURM, once, and have it requeued until it is done.",
    "job-step": "Run the ranks of a batch job, and send it back into the queue: its script's last line.",
    "bench": "Time rounds, start-up and the reduction beside the least they could take.",
    "scale": "Time a recipe on more and more ranks, and predict it on thousands.",
}

LEAVE_FILES = (
    "prepare",
    "run",
    "sweep",
    "study",
    "reproduce",
    "report",
    "scale",
    "certify",
    "without",
    "contributions",
    "vectors",
    "export",
)
"""Commands whose result is files; the result of the others, and with ``--json``, is their output."""

STOP_ON_SIGNAL = ("run", "sweep", "study", "reproduce", "without", "contributions")
"""Commands whose runs SIGUSR1 stops with a checkpoint; outside of runs it must not end them."""

WITH_JSON = ("inspect", "prepare", "verify", "compare", "report", "sweep", "study", "doctor", "estimate")
"""Commands whose ``--json`` prints one document, of an error, too."""

STARTS_RANKS = "job-step"
"""The command that starts ranks and is none; it passes SIGUSR1 on."""

WITH_RANKS = (*STOP_ON_SIGNAL, "verify", "estimate", "bench", "scale", "doctor")
"""Commands that use the ranks that a launcher has started."""

COMPUTE = (*WITH_RANKS, "replay", "compare", "predict", "vectors")
"""Commands that compute: where the working folder is removed, MKL does not find its libraries and ends the process."""


COMPLETES = "_HPCFED_COMPLETE"
"""Variable by which click is asked to complete words, or for the lines that a shell needs to do so."""


class _Lazy(click.Group):
    """A group whose subcommands live in ``hpcfed.cli.<name>.command``; `hpcfed --help` imports none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in SUBCOMMANDS:
            return None
        return registry.entry("hpcfed.cli", name).command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in SUBCOMMANDS:
            raise click.UsageError(f"no command {args[0]!r}; {nearest(args[0], SUBCOMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(SUBCOMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Federated learning on a workstation or a cluster, the same result on any number of ranks."""


def main(args: list[str] | None = None) -> None:
    """Entry point of the console script: run the command, then leave with the same exit code on every rank."""
    from hpcfed.io.output import streams

    if COMPLETES in os.environ:
        from hpcfed.cli.completion import set_up

        set_up()
    words = sys.argv[1:] if args is None else args
    name = next((word for word in words if not word.startswith("-")), "")
    warnings.formatwarning = _in_a_line
    listens = name in (*STOP_ON_SIGNAL, STARTS_RANKS)
    if listens:
        note_signals()
    else:
        end_noting()
    with streams(matters=name not in LEAVE_FILES or not {"--list", "--json"}.isdisjoint(words)):
        code = _call(name, args)
    if listens:
        ignore_signals()
    gc.freeze()  # the process ends: a search for garbage among torch's modules takes half a second
    sys.exit(code)


def _call(name: str, args: list[str] | None) -> int:
    """Run the command of that name; return the exit code that all ranks have agreed on."""
    from hpcfed.ranks.world import World, leave

    code, message = 0, ""
    has_document = name in WITH_JSON and "--json" in (sys.argv[1:] if args is None else args)
    if has_document:
        from hpcfed.cli import documents

        documents.begin(name)
    try:
        if name in COMPUTE:
            working_folder()
        code = cli.main(args=args, prog_name="hpcfed", standalone_mode=False) or 0
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as help_page:
        code, message = 2, help_page.format_message()
    except click.UsageError as error:
        hint = f" (see '{error.ctx.command_path} --help')" if error.ctx else ""
        code, message = 2, f"hpcfed: {_of_usage(error)}{hint}"
    except click.exceptions.Abort:
        code, message = 130, "hpcfed: interrupted"
    except HpcfedError as error:
        code, message = error.exit_code, f"hpcfed: {error}" if error.exit_code else ""
    except FileNotFoundError as error:
        code, message = _of_missing(error)
    except PermissionError as error:  # of a file that is only looked for, too
        code, message = 2, f"hpcfed: {visible(str(error.filename))}: Permission denied; check its permissions"
    except MemoryError:  # a file may claim, or a sparse one have, more than any machine
        code, message = _of_memory()
    except OSError as error:
        failure = system_failure(error)
        code, message = (failure.exit_code, f"hpcfed: {failure}") if failure else (1, traceback.format_exc())
    except RuntimeError as error:
        code, message = _of_runtime(error)
    except Exception:  # a defect of ours: the other ranks may be waiting for this one, so it must not just end
        code, message = 1, traceback.format_exc()
    except BaseException as ending:  # of a completed word, a signal to a command that starts others, or the user's code
        code, message = _of_exit(ending)
    document = documents.error_of(name, code, message) if has_document and message and code else ""
    if name == STARTS_RANKS:
        return World().leave(code, message)
    return leave(code, message, document, alone=name not in WITH_RANKS)


PACKAGE = Path(__file__).parents[1]
_with_source = warnings.formatwarning


def _in_a_line(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
    """Return the text of a warning: one of hpcfed's own as a line of a command, others with their place."""
    if PACKAGE in Path(filename).parents:
        return f"hpcfed: {visible(str(message))}\n"
    return _with_source(message, category, filename, lineno, line)


def _of_usage(error: click.UsageError) -> str:
    """Return the message; of an unknown option with the recipe's key that is meant, else the likeliest option."""
    if not isinstance(error, click.NoSuchOption):
        return error.format_message()
    option, likeliest = error.option_name, [*(error.possibilities or ())][:1]
    if likeliest and likeliest[0].startswith(option):
        return f"no option {option!r}; did you mean {likeliest[0]!r}?"
    if error.ctx and any(each.name == "overrides" for each in error.ctx.command.params):
        from hpcfed.config.hints import for_option
        from hpcfed.config.recipe import Recipe

        if remedy := for_option(option, Recipe):
            return f"no option {option!r}; {remedy}"
    return f"no option {option!r}; did you mean {likeliest[0]!r}?" if likeliest else error.format_message()


def _of_missing(error: FileNotFoundError) -> tuple[int, str]:
    """Return exit code and message; without a working folder no relative path has a meaning."""
    try:
        working_folder()
    except HpcfedError as removed:
        return removed.exit_code, f"hpcfed: {removed}"
    return 1, "".join(traceback.format_exception(error))


def _of_exit(ending: BaseException) -> tuple[int, str]:
    """Return exit code and message of a process that was to end: by code of the user's it is an error."""
    from hpcfed.config.user_code.blame import blamed

    if isinstance(ending, KeyboardInterrupt):
        return 130, "hpcfed: interrupted"
    if failure := blamed(ending):
        return failure.exit_code, f"hpcfed: {failure}"
    if not isinstance(ending, SystemExit):
        return 1, "".join(traceback.format_exception(ending))
    return (ending.code if isinstance(ending.code, int) else int(ending.code is not None)), ""


def _of_memory() -> tuple[int, str]:
    full = EnvironmentFailure("not enough memory", remedy="use a machine with more, or a smaller file or model")
    return full.exit_code, f"hpcfed: {full}"


def _of_runtime(error: RuntimeError) -> tuple[int, str]:
    """Return exit code and message; a library's failure to get a thread or memory is the machine's, not a defect."""
    if HOST_FULL in str(error):
        return _of_memory()
    if NO_MORE not in str(error):
        return 1, traceback.format_exc()
    failure = no_more_threads("of a library")
    return failure.exit_code, f"hpcfed: {failure}"


if __name__ == "__main__":
    main()
