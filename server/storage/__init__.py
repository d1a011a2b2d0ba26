"""The server's storage for its clients, on disk or in memory."""
