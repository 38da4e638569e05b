"""Pure: checks that the cluster that answers is still the one that was met first (promise S10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from store.errors import StoreReplaced

if TYPE_CHECKING:
    from store.etcd.rpc import etcd_pb2 as pb


class Identity:
    """The cluster that a client knows: its id, the last member, and the latest revision."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.cluster_id: str | None = None
        self.member_id: str = ""
        self.revision: int = 0

    def met(self, header: pb.ResponseHeader, *, floor: int = 0) -> None:
        """Note a member's answer; raise `StoreReplaced` if it is from another cluster.

        A cluster whose data was deleted keeps its id, which is made from its addresses, but its revisions begin anew.
        Unless the data was deleted, an answer through the consensus is never older than `floor`, the revision known
        before.
        """
        cluster_id, revision = f"{header.cluster_id:x}", header.revision
        reason = ""
        if self.cluster_id not in (None, cluster_id):
            reason = f"{self.cluster_id} has been replaced by {cluster_id}"
        elif revision < floor:
            reason = f"it is at revision {revision}, and was at {floor} before"
        if reason:
            raise StoreReplaced(
                f"the cluster at {self._name} is not the one this client knew: {reason}, so its data is gone"
            )
        self.cluster_id, self.member_id = cluster_id, f"{header.member_id:x}"
        self.revision = max(self.revision, revision)
