"""Access to etcd: gRPC's connections, and the messages of etcd's API, compiled from `etcd.proto`."""
