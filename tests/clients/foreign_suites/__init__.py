"""Test suites of other servers (vLLM's, llama.cpp's), run against this one.

`make test-suites` downloads each suite from the source package on PyPI into `build/suites` and runs it there. A pytest
plugin, one for each suite, replaces the fixture that would start the other server. Nothing of the suites is kept here.
"""
