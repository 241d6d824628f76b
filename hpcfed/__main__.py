"""``hpcfed``, the console script, and ``python -m hpcfed``."""

from __future__ import annotations

from hpcfed.ranks.early import interrupt_imports, note_signals
from hpcfed.ranks.parent import fork_rank


def main() -> None:
    """Run the command; a signal that comes during the imports is noted, an interrupt ends them."""
    note_signals()
    fork_rank()
    interrupt_imports()
    from hpcfed.cli.main import main as call
    from hpcfed.ranks.world import exit_without_threads

    try:
        call()
    except SystemExit as ending:
        exit_without_threads(int(ending.code or 0))
        raise


if __name__ == "__main__":
    main()
