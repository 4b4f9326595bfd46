"""The start of test scripts that run without the package: `import hf_sparseprior` fails in them."""

WITHOUT_PACKAGE = """
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_sparseprior":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())
"""
