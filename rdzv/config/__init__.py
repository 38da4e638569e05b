"""The user's settings, and the errors for wrong ones."""
