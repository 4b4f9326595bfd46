"""mmengine lays out a run's configuration with yapf, the whole text of it for every log, file and checkpoint, which is
half of what a small run takes. That it is Python is what tests need."""

import fcntl
import tempfile
from contextlib import suppress
from pathlib import Path


def unformatted(text, **options):
    compile(text, "configuration", "exec")
    return text, False


# The first import on a machine writes yapf's cache, which a second process must not read half written.
with suppress(ImportError), open(Path(tempfile.gettempdir(), "hf_sparseprior-tests-yapf.lock"), "a") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    from yapf.yapflib import yapf_api

    yapf_api.FormatCode = unformatted
