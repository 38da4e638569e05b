"""A client of an etcd v3 cluster; `member_choice`, `codec` and `transactions` do no I/O."""
