"""Shell: the role of coordinator: the election, and a term's watching, deciding, committing and reporting."""
