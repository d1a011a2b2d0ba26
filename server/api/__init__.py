"""The APIs that the server supports, a folder or module each (dialects.py lists them), and the code they share."""
