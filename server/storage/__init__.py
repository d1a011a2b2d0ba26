"""What the server keeps for its clients, on disk or in memory."""
