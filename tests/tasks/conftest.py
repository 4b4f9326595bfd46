"""mmengine lays out a run's configuration with yapf, the whole text of it for every log, file and checkpoint, which is
half of what a small run takes. That it is Python is what tests need."""

from contextlib import suppress


def unformatted(text, **options):
    compile(text, "configuration", "exec")
    return text, False


with suppress(ImportError):
    from yapf.yapflib import yapf_api

    yapf_api.FormatCode = unformatted
