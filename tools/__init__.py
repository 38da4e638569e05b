"""What makes a release; not part of the packages."""
