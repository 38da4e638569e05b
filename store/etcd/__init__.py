"""A client of an etcd v3 cluster; the modules `member_choice`, `codec` and `transactions` are pure."""
