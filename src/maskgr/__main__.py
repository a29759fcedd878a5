"""`python -m maskgr`, which `torchrun -m maskgr` needs."""

from maskgr.cli import main

main()
