"""A server: an HTTP API that clients already speak, and a page (extra `serve`)."""
