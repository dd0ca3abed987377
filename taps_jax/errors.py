"""The one exception for bad input, and how a command line reports it."""

import sys
from collections.abc import Callable


class InputError(ValueError):
    """Something the user gave is wrong; the message names it, what was found and what was expected."""


def report_input_errors(main: Callable[[], None]) -> None:
    """Runs `main`; an InputError becomes one line on stderr and exit status 1."""
    try:
        main()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
