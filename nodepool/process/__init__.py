"""Process features of daemons: background, signals, stack dumps, REPL, watchdog."""
