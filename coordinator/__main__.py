"""Runs the command line as `python -m strata_coord.coordinator`."""

from strata_coord.coordinator.entry import main

if __name__ == "__main__":
    main()
