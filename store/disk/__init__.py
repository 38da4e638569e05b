"""The data directory: its files, rows, formats, checks and copies."""
