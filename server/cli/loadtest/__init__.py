"""Load tests of OpenAI-compatible servers: requests, arrival times, and reports."""
