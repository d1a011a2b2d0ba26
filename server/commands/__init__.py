"""What each command of `samewise` does; a module is imported only when its command runs."""
