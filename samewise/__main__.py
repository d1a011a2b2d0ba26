"""`python -m samewise`, the same as the script `samewise`."""

from samewise import main

main()
