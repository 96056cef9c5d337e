"""What every daemon is as a process: background, signals, stack dumps, REPL, watchdog."""
