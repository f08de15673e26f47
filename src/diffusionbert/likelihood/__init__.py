"""What a number of nats means: how it was found, how sure it is, and what it may be compared with."""
