"""What scripts of tests begin with that are to run where `import hf_sparseprior` fails."""

WITHOUT_PACKAGE = """
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_sparseprior":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())
"""
