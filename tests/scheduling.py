"""How pytest-xdist hands out test files, so that a process that dies costs the test that it ran and no more.

pytest-xdist 3.8 hands the whole workload of a dead process out again, what is done and what killed it included, and
then waits for ever for the end of units in which nothing is left (pytest-dev/pytest-xdist, issues 1323, 1327 and 1378).
"""

from xdist.scheduler import LoadFileScheduling


class FileScheduling(LoadFileScheduling):
    """File by file, as `--dist loadfile`; after a crash the rest of the file is run, and the run ends."""

    def remove_node(self, node):
        """Hand out what a process left undone, without the test that it died of, whose name is returned."""
        workload = self.assigned_work.pop(node)
        left = {scope: [name for name, done in unit.items() if not done] for scope, unit in workload.items()}
        left = {scope: names for scope, names in left.items() if names}
        if not left:
            return None
        crashed = next(iter(left.values())).pop(0)
        for scope, names in left.items():
            if names:
                self.workqueue[scope] = dict.fromkeys(names, False)
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node):
        """Give a process units until it has the two tests without which it does not begin, or let it end."""
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 3:
            self._assign_work_unit(node)
        if not self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 3:
            node.shutdown()
