"""Several models behind one address: which of them are loaded, and who waits for one."""
