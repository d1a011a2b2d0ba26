"""Rows of the table of architectures, by what is special about their layers."""  # Short: names a package
