"""What two tiers keep of a suspended request, and what a reset makes them forget."""

from __future__ import annotations

import numpy as np

from distkv.pages import Ids
from distkv.runs import Run
from distkv.tiered import NONE, TieredIndex

__all__ = ["KeepingIndex"]


class KeepingIndex(TieredIndex):
    """A :class:`TieredIndex` for a whole cache: sequences are suspended, tiers are reset."""

    # ---- suspended requests

    def keep(self, request_id: str, pages: Ids) -> int:
        """Moves the last of a suspended sequence's stored pages to the share of suspended requests. Returns how many.

        They are those that nobody but it has, from its last page up; all of them, or none if the share is too small.
        The sequence still owns them.
        """
        runs = self._own_tail(pages)
        count = sum(take for _, take in runs)
        kept = self.tier.pages
        fresh = [h for run, take in runs for h in self._backup[run.page_ids(run.resident - take, run.resident)].tolist()
                 if h == NONE or not kept.is_kept(h)]
        if not count or len(fresh) > kept.may_keep:
            return 0
        names: list[int] = []
        for run, take in runs:
            hosts = self._hosts_to_keep(run, take)
            names += hosts
            if len(hosts) < take:  # what could be kept of the run stays in the tier as any other page does
                break
            self._demote(run, hosts)
        self.tier.kept.setdefault(request_id, []).extend(names)
        return len(names)

    def _own_tail(self, pages: Ids) -> list[tuple[Run, int]]:
        """The runs at the end of a sequence's pages, last first, with how many of their last pages only it has."""
        found: list[tuple[Run, int]] = []
        last: Run | None = None
        for page in reversed(pages.tolist()):
            run = self.entries.run_with(page)
            alone = self.pool.owners[page] == 1 and not self.pool.holds[page]
            if run is None or not alone:
                break
            if run is last:
                found[-1] = run, found[-1][1] + 1
                continue
            below = last is not None and last.parent is run and found[-1][1] == last.resident
            if run.pages[run.resident - 1] != page or run.warm != below or (last is not None and not below):
                break
            found.append((run, 1))
            last = run
        return found

    def _hosts_to_keep(self, run: Run, take: int) -> list[int]:
        """As :meth:`_hosts_for`, out of the share of suspended requests; each is kept from now on."""
        pages, hosts = self.tier.pages, []
        for page in run.page_ids(run.resident - take, run.resident).tolist():
            host = int(self._backup[page])
            if host == NONE:
                if not pages.free and not self._give_up_coldest():
                    break
                taken = pages.take()
                assert taken is not None
                host = taken
                self._backup[page], self._original[host] = host, page
                self.tier.store(page, host)
            pages.keep(host)
            hosts.append(host)
        return hosts

    # ---- resets

    def forget_device(self) -> None:
        """No device page is indexed any more. What has a backup is on the host alone, all else leaves."""
        todo = [run for run in self.runs() if run.resident and not run.warm]
        while todo:
            run = todo.pop()
            hosts: list[int] = self._backup[run.page_ids(0, run.resident)].tolist()
            backed = next((at for at, host in enumerate(hosts) if host == NONE), len(hosts))
            if backed < len(hosts):
                self._drop_subtree(run, backed)
            if backed:
                self._demote(run, hosts[:backed])
            if isinstance(run.parent, Run) and run.parent.resident and not run.parent.warm:
                todo.append(run.parent)

    def forget_host(self) -> None:
        """No host page is indexed any more; entries on the device stay."""
        for host in np.flatnonzero(self._original != NONE).tolist():
            self._drop_backup(host)
        for run in self.runs():
            if self.entries.runs[run.slot] is run and run.resident < len(run):
                self._drop_subtree(run, run.resident)
