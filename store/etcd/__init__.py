"""A client of an etcd v3 cluster; the modules `choice`, `codec` and `transactions` are pure."""
