"""Shell: what a node tells of its member's steps, and what a coordinator makes of those of all members."""
