"""The `horde` command line. Each command lies in the file named for it; heavy imports wait until one runs."""
