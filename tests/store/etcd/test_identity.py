"""Promise S10 on etcd: whether the cluster that answers is the one that was met first."""

from __future__ import annotations

import pytest

from store.errors import StoreError, StoreReplaced
from store.etcd.identity import Identity
from store.etcd.rpc import etcd_pb2 as pb


def header(cluster_id: int = 7, revision: int = 5) -> pb.ResponseHeader:
    return pb.ResponseHeader(cluster_id=cluster_id, revision=revision)


def known() -> tuple[Identity, list[StoreError]]:
    identity, told = Identity("etcd://a:2379"), list[StoreError]()
    identity.failed = told.append
    identity.met(header())
    return identity, told


def test_the_first_cluster_that_answers_is_known_from_then_on() -> None:
    identity, told = known()
    assert (identity.cluster_id, identity.revision) == ("7", 5)
    identity.met(header(revision=9), floor=5)
    identity.met(header(revision=8))  # of a member that lags: it did not go through the consensus
    assert identity.revision == 9
    assert told == []


def test_another_cluster_is_told_and_said() -> None:
    identity, told = known()
    with pytest.raises(StoreReplaced, match=r"cluster at etcd://a:2379 .* 7 has been replaced by 8"):
        identity.met(header(cluster_id=8))
    assert [type(error) for error in told] == [StoreReplaced]
    assert identity.cluster_id == "7", "it is not taken for the one that is known"


def test_one_whose_revisions_have_begun_anew_is_another_though_its_id_is_the_same() -> None:
    identity, told = known()
    with pytest.raises(StoreReplaced, match="at revision 2, and was at 5 before"):
        identity.met(header(revision=2), floor=5)
    assert len(told) == 1
