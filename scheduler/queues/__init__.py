"""In which order waiting choices are admitted, and which running one makes room when the blocks run out."""
