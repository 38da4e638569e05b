"""Shell: the role of coordinator: who takes it, and what whoever has it watches, decides, commits and reports."""
