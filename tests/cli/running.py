"""The command line from its entry point on: in this process, which has imported what takes long, or in its own."""

import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

from attnscale.cli import main

ENVIRONMENT = {"COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}


def in_a_process(*arguments, **environment):
    """Run `attnscale …` as a shell would."""
    return subprocess.run(
        [sys.executable, "-m", "attnscale", *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | ENVIRONMENT | environment,
        check=False,
    )


def run(*arguments, **environment):
    """Run `attnscale …` here, with streams that are no terminal; what the entry point lets through is raised."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    command = ["attnscale", *map(str, arguments)]
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", command),
        mock.patch.dict(os.environ, ENVIRONMENT | environment),
    ):
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code
    printed, told = (stream.buffer.getvalue().decode("utf-8") for stream in (out, err))
    return subprocess.CompletedProcess(command, status, printed, told)
