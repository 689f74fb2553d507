"""`python -m workbench.cli`."""

from workbench.cli import main

if __name__ == "__main__":
    main()
