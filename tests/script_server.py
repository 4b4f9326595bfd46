"""Runs scripts in processes forked from one that has imported torch and transformers, and not this package.

`processes.run_script` starts it and gives it a line of JSON for every script; it answers with the exit status.
"""

import gc
import json
import os
import signal
import sys
import traceback
from importlib.abc import MetaPathFinder
from types import ModuleType

import torch  # noqa: F401
from transformers import AutoModel, PreTrainedModel, pipeline  # noqa: F401  not Trainer, which imports peft


class Absent(MetaPathFinder):
    """`import hf_sparseprior` fails."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_sparseprior":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


assert "hf_sparseprior" not in sys.modules
gc.collect()
gc.freeze()
for line in sys.stdin:
    request = json.loads(line)
    if not (process := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
else:
    sys.exit()

# From here on this is the script's process.
signal.alarm(request["seconds"])
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["environment"])
for number, path in enumerate((os.devnull, *request["output"])):
    os.dup2(os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY), number)
sys.argv = ["-c", *request["arguments"]]
sys.path[:0] = ["", *request["path"]]
if not request["package"]:
    sys.meta_path.insert(0, Absent())
sys.modules["__main__"] = main = ModuleType("__main__")
try:
    exec(compile(request["script"], "<string>", "exec"), vars(main))
    status = 0
except SystemExit as end:
    status = end.code if isinstance(end.code, int) else int(end.code is not None)
except BaseException:
    traceback.print_exc()
    status = 1
sys.stdout.flush()
os._exit(status)  # to free what the server has imported takes a second and a half
