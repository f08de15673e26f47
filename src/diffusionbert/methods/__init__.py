"""One paper a file, all peers."""
