"""The APIs that the server speaks: a folder or a module each (dialects.py lists them), and the one way behind them."""
