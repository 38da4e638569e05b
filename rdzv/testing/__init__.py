"""For the tests of those who use rdzv."""
