"""The server: an HTTP API for existing clients, and a web page (extra `serve`)."""
