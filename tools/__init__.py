"""The tools for a release; not part of the packages."""
