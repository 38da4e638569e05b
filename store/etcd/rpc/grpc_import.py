"""gRPC, imported once, with its settings; if it is missing, the error names the extra."""

from __future__ import annotations

import os

# By default gRPC logs errors to standard error; callers get these errors from this client.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# gRPC's fork() handlers would wait for gRPC's threads; `connection` refuses use in a forked child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

try:
    import grpc
    import grpc.aio

    from store.etcd.rpc import etcd_pb2
except ImportError as _error:
    raise ImportError(f"etcd needs grpcio and protobuf ({_error}); pip install 'rdzv[etcd]'") from _error

__all__ = ["etcd_pb2", "grpc"]
