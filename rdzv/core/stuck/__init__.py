"""Pure: which members of a round are alive, and do not get on."""
