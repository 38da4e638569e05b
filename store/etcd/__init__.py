"""Shell: the same client methods over an etcd v3 cluster; its codec and transactions are pure."""
