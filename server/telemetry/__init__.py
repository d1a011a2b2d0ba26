"""What the server tells of itself: log lines, metrics, the record of each request."""
