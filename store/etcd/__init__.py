"""Shell: the client's methods on an etcd v3 cluster; codec and transactions are pure."""
