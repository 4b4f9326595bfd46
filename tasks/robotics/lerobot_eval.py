"""lerobot-eval with our policies and simulators: python -m tasks.robotics.lerobot_eval --policy.path=OUT [ARGUMENTS]

All arguments are lerobot-eval's. --env.type=sparseprior and the discovery of our plugin are added. lerobot 0.4 cannot
be imported where transformers 5 is: one of its policies, GR00T, fails. This command tells lerobot that there is no
transformers, in this process alone, so that it leaves out what needs it.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

from hf_sparseprior.runs.command import run_command
from tasks.robotics import commands

PLUGIN = "tasks.robotics.lerobot_plugin"


def run(arguments: list[str]) -> None:
    """lerobot-eval, in this process.

    Raises:
        ImportError: without lerobot.
    """
    try:
        from lerobot.utils import import_utils
    except ImportError as error:
        raise ImportError(f"lerobot cannot be imported ({error}); docs/lerobot.md says how to install it") from None
    if int(version("transformers").partition(".")[0]) >= 5 and version("lerobot").startswith("0.4."):
        import_utils._transformers_available = False
    from lerobot.scripts import lerobot_eval

    added = [f"--env.discover_packages_path={PLUGIN}", "--env.type=sparseprior"]
    given = {argument.partition("=")[0] for argument in arguments}
    sys.argv = ["lerobot-eval", *(each for each in added if each.partition("=")[0] not in given), *arguments]
    lerobot_eval.main()


def main(argv: list[str] | None = None) -> int:
    """Command line; a missing lerobot is one line."""
    parser = commands.lerobot_eval()
    _, arguments = parser.parse_known_args(argv)
    return run_command(parser.prog, lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
