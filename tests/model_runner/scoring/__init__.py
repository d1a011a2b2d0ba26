"""Tests of scores that mix distributions."""
