"""From what a request asks for to the events that answer it, whatever API it came through."""
